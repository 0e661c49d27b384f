# SPDX-License-Identifier: Apache-2.0
"""What ranks on GPUs have to know of each other before their first collective."""

from __future__ import annotations

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.core.config import ConfigError


def backend_for(device: torch.device) -> str:
    """The backends of a process group whose ranks compute on ``device``: tensors go by where they are."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def gpu_name(device: torch.device) -> str:
    """What no other GPU is called, on whatever machine; empty for the CPU."""
    if device.type == "cpu":
        return ""
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} {properties.uuid}"


def check_gpus(store: Store, rank: int, size: int, gpu: str) -> None:
    """Make sure that all ranks compute on CPUs, or each on a GPU of its own: NCCL takes no two on one.

    ``store``: common to the ranks, which all call this. ``gpu``: see `gpu_name`.

    Raises:
        ConfigError: two ranks share a GPU, or some have none.
    """
    store.set(f"gpu/{rank}", gpu)
    told = [store.get(f"gpu/{other}").decode() for other in range(size)]
    for other, name in enumerate(told):
        if bool(name) != bool(told[0]):
            raise ConfigError(
                "device", f"ranks 0 and {other} differ: {told[0] or 'the CPU'} and {name or 'the CPU'}; use one for all"
            )
        if name and (first := told.index(name)) != other:
            raise ConfigError(
                "device",
                f"ranks {first} and {other} are on one GPU ({name}), and NCCL takes one rank each; show each command"
                " other GPUs (CUDA_VISIBLE_DEVICES), or run these ranks by one command",
            )
