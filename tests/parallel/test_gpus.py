# SPDX-License-Identifier: Apache-2.0
"""What ranks on GPUs tell each other when they meet, through a store as they have it; no GPU is used."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch.distributed import FileStore

from paceline.core.config import ConfigError
from paceline.parallel.gpus import backend_for, check_gpus, gpu_name


def told(folder: Path, gpus: list[str]) -> list[str | None]:
    """What each rank is told, None if nothing is wrong."""
    said: list[str | None] = [None] * len(gpus)

    def rank(number: int) -> None:
        store = FileStore(str(folder / "store"), len(gpus))
        try:
            check_gpus(store, number, len(gpus), gpus[number])
        except ConfigError as error:
            said[number] = str(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(gpus))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return said


def test_ranks_on_gpus_of_their_own_and_on_cpus_may_go_on(tmp_path: Path) -> None:
    for i, gpus in enumerate((["A", "B", "C"], ["", ""])):
        (tmp_path / str(i)).mkdir()
        assert told(tmp_path / str(i), gpus) == [None] * len(gpus)


def test_two_ranks_on_one_gpu_are_refused_everywhere(tmp_path: Path) -> None:
    for message in told(tmp_path, ["A", "B", "A"]):
        assert message is not None
        assert message.startswith("device: ranks 0 and 2 are on one GPU (A), and NCCL takes one rank each")


def test_cpus_and_gpus_do_not_mix(tmp_path: Path) -> None:
    for message in told(tmp_path, ["A", ""]):
        assert message == "device: ranks 0 and 1 differ: A and the CPU; use one for all"


def test_backends_go_by_device() -> None:
    assert backend_for(torch.device("cpu")) == "gloo"
    assert backend_for(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"
    assert gpu_name(torch.device("cpu")) == ""
