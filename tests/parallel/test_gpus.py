# SPDX-License-Identifier: Apache-2.0
"""What ranks on GPUs tell each other when they meet, through a store as they have it; no GPU is used."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.config import ConfigError
from paceline.parallel import rendezvous
from paceline.parallel.gpus import backend_for, gpu_conflict, gpu_name
from paceline.parallel.rendezvous import Meeting, Place
from tests.server.harness import wait_until


def test_ranks_on_gpus_of_their_own_and_on_cpus_may_go_on() -> None:
    assert gpu_conflict(["A", "B", "C"]) is None
    assert gpu_conflict(["", ""]) is None


def test_cpus_and_gpus_do_not_mix() -> None:
    assert gpu_conflict(["A", ""]) == "ranks 0 and 1 differ: A and the CPU; use one for all"
    assert gpu_conflict(["", "A"]) == "ranks 0 and 1 differ: the CPU and A; use one for all"


class LateLook:
    """The store of a rank whose look for the others is overtaken by what they then say."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._looked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        if len(keys) > 1 and not self._looked:
            self._looked = True
            wait_until(lambda: self._store.check([rendezvous.FAILED]), "the others to fail")
            return False
        return bool(self._store.check(keys))


@pytest.mark.parametrize("late", [None, 1])
def test_two_ranks_on_one_gpu_are_refused_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: int | None
) -> None:
    made = rendezvous._store
    monkeypatch.setattr(rendezvous, "gpu_name", lambda device: "AB"[device.index % 2])
    monkeypatch.setattr(rendezvous, "_store", lambda at: LateLook(made(at)) if at.rank == late else made(at))

    def refused(rank: int) -> str:
        place = Place(size=3, rank=rank, store=str(tmp_path / "store"), inbox="ipc://x", timeout_s=30)
        with pytest.raises(ConfigError) as error:
            Meeting(place, torch.device("cuda", rank))
        return str(error.value)

    with ThreadPoolExecutor(3) as ranks:
        for message in ranks.map(refused, range(3)):
            assert message.startswith("device: ranks 0 and 2 are on one GPU (A), and NCCL takes one rank each")


def test_backends_go_by_device() -> None:
    assert backend_for(torch.device("cpu")) == "gloo"
    assert backend_for(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"
    assert gpu_name(torch.device("cpu")) == ""
