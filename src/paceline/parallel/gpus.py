# SPDX-License-Identifier: Apache-2.0
"""What ranks on GPUs have to know of each other before their first collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def backend_for(device: torch.device) -> str:
    """The backends of a process group whose ranks compute on ``device``: tensors go by where they are."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def gpu_name(device: torch.device) -> str:
    """What no other GPU is called, on whatever machine; empty for the CPU."""
    if device.type == "cpu":
        return ""
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} {properties.uuid}"


def gpu_conflict(gpus: Sequence[str]) -> str | None:
    """What keeps ranks on ``gpus`` (see `gpu_name`, by rank) from forming a group; None: nothing.

    All compute on CPUs, or each on a GPU of its own: NCCL takes no two on one.
    """
    for rank, name in enumerate(gpus):
        if bool(name) != bool(gpus[0]):
            return f"ranks 0 and {rank} differ: {gpus[0] or 'the CPU'} and {name or 'the CPU'}; use one for all"
        if name and (first := gpus.index(name)) != rank:
            return (
                f"ranks {first} and {rank} are on one GPU ({name}), and NCCL takes one rank each; show each command"
                " other GPUs (CUDA_VISIBLE_DEVICES), or run these ranks by one command"
            )
    return None
