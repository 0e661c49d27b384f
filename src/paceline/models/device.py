# SPDX-License-Identifier: Apache-2.0
"""Where a model runs: on the CPU, or on a GPU that its rank has to itself."""

from __future__ import annotations

import torch

from paceline.core.config import require, require_choice

DEVICES = ("auto", "cpu", "cuda")


def resolve_device(wanted: str, *, local_rank: int = 0, local_ranks: int = 1) -> torch.device:
    """The device of a rank, the current one of this process from then on.

    ``auto`` is a GPU where PyTorch can use one, else the CPU. Ranks of one machine take its GPUs in order.

    Args:
        wanted: one of `DEVICES`.
        local_rank: which of the ranks that one command runs on this machine.
        local_ranks: how many these are.

    Raises:
        ConfigError: there is no GPU, or there are fewer than ranks.
    """
    require_choice(wanted, DEVICES, "device")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and not gpus):
        return torch.device("cpu")
    build = "its build is for CPUs" if torch.version.cuda is None else f"its build is for CUDA {torch.version.cuda}"
    require(
        gpus > 0, "device", f"cuda was asked for, and PyTorch {torch.__version__} finds no GPU here ({build}); use cpu"
    )
    require(
        local_ranks <= gpus,
        "device",
        f"{local_ranks} ranks run here, each on a GPU of its own, and PyTorch finds {gpus}; run fewer here, or use cpu",
    )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def arithmetic_on(device: torch.device, dtype: str, quantization: str | None) -> tuple[str, str | None]:
    """``dtype`` and ``quantization`` for ``device``, where nothing said means something else on a GPU: bfloat16.

    Raises:
        ConfigError: int8 on a GPU.
    """
    if device.type == "cpu":
        return dtype, quantization
    require(quantization != "int8", "quantization", "int8 runs on CPUs only; leave it out, or use device cpu")
    return ("bfloat16" if dtype == "auto" else dtype), "none"
