# SPDX-License-Identifier: Apache-2.0
"""How large the KV cache of a rank on a GPU may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.core.config import require
from paceline.models.llama import Llama
from paceline.models.spec import LlamaConfig

DEFAULT_UTILIZATION = 0.9
"""Share of the GPU's memory that a rank uses if nothing is said."""
CONTEXT_BYTES = 1 << 30
"""Set aside for what PyTorch does not count: the CUDA context, kernels, graphs, the buffers of NCCL."""
ROUNDED_BYTES = 1 << 26
"""The result is a multiple of this, so that ranks with equal GPUs come to the same."""


def asked_utilization(given: float | None, device: torch.device, sizes: Sequence[int | None]) -> float | None:
    """The share of the GPU's memory to use; None on the CPU, and where one of ``sizes`` settles the cache's size.

    Raises:
        ConfigError: it is not a share, there is no GPU to take it of, or the size is settled.
    """
    name, sized = "gpu_memory_utilization", any(size is not None for size in sizes)
    if device.type == "cpu" or sized:
        require(given is None or sized, name, "belongs to device cuda; kv_cache_memory_bytes sizes the cache here")
        require(given is None, name, "give either this, or kv_cache_memory_bytes, or num_gpu_blocks_override")
        return None
    value = DEFAULT_UTILIZATION if given is None else given
    require(0.0 < value <= 1.0, name, f"must be above 0 and at most 1, got {value!r}")
    return value


def cache_bytes(model: Llama, width: int, options: Mapping[str, Any], utilization: float) -> int:
    """Bytes for the KV cache: what ``utilization`` of the GPU leaves beside the weights and the largest step.

    The step is estimated, not run (`step_bytes`).

    Args:
        model: loaded, as is its drafter.
        width: tokens of a verifier row.
        options: those of the engine.

    Raises:
        ConfigError: nothing is left, or others use the GPU.
    """
    length = options["max_model_len"]
    context = model.config.max_position if length in (None, "auto") else length
    rows, tokens = options["max_num_seqs"], options["max_num_batched_tokens"]
    step = step_bytes(model.config, model.dtype, rows=rows, width=width, tokens=tokens, context=context)
    free, total = torch.cuda.mem_get_info(model.device)
    weights = torch.cuda.memory_allocated(model.device)
    found = int(total * utilization) - weights - step - CONTEXT_BYTES
    found -= found % ROUNDED_BYTES
    sizes = f"{total >> 20} MiB, of which {weights >> 20} MiB are weights and {step >> 20} MiB are set aside for a step"
    require(
        found > 0,
        "gpu_memory_utilization",
        f"{utilization} leaves no memory for the KV cache: the GPU has {sizes}; raise it, or lower max_num_seqs or"
        " max_model_len",
    )
    require(
        found + step <= free,
        "gpu_memory_utilization",
        f"{utilization} asks for more than is free: {free >> 20} MiB are, the rest is used by others; lower it",
    )
    return found


def step_bytes(c: LlamaConfig, dtype: torch.dtype, *, rows: int, width: int, tokens: int, context: int) -> int:
    """What the largest step needs beside weights and cache, at most, roughly: activations of ``tokens`` tokens, logits
    of ``rows`` rows of ``width``, and the keys, values and scores of all rows, gathered for one layer.
    """
    each = dtype.itemsize
    inner = c.intermediate_size
    if c.experts is not None:
        # Where products cannot be grouped, every expert computes every token.
        inner = max(inner, c.experts.num_experts * c.experts.intermediate_size)
    heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    activations = tokens * (4 * c.hidden_size + 2 * heads + 4 * inner) * max(each, 4)
    # As computed, in float32, and the probabilities of rows that are sampled.
    logits = rows * width * c.vocab_size * (each + 2 * 4)
    gathered = rows * context * 2 * c.num_kv_heads * c.head_dim * 2 * each
    scores = rows * width * c.num_heads * context * (2 * each + 4)
    return activations + logits + gathered + scores
