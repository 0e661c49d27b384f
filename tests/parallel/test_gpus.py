# SPDX-License-Identifier: Apache-2.0
"""What ranks on GPUs tell each other when they meet, through a store as they have it; no GPU is used."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from paceline.core.config import ConfigError
from paceline.parallel.gpus import backend_for, gpu_conflict, gpu_name
from paceline.parallel.rendezvous import Meeting, Place


def test_ranks_on_gpus_of_their_own_and_on_cpus_may_go_on() -> None:
    assert gpu_conflict(["A", "B", "C"]) is None
    assert gpu_conflict(["", ""]) is None


def test_cpus_and_gpus_do_not_mix() -> None:
    assert gpu_conflict(["A", ""]) == "ranks 0 and 1 differ: A and the CPU; use one for all"
    assert gpu_conflict(["", "A"]) == "ranks 0 and 1 differ: the CPU and A; use one for all"


def test_two_ranks_on_one_gpu_are_refused_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.parallel.rendezvous.gpu_name", lambda device: "AB"[device.index % 2])

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
