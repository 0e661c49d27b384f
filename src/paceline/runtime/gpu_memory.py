# SPDX-License-Identifier: Apache-2.0
"""How large the KV cache of a rank on a GPU may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.core.config import require
from paceline.execution.attention import QUERY_CHUNK
from paceline.models.experts import Mixture, groups_on_device
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
    experts = _experts_of_a_token(model)
    step = step_bytes(
        model.config, model.dtype, rows=rows, width=width, tokens=tokens, context=context, experts=experts
    )
    # What loading took and gave back would count as used by others.
    torch.cuda.empty_cache()
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


def _experts_of_a_token(model: Llama) -> int:
    """How many experts compute each token of a step, whether it chose them or not; 0 in a dense model."""
    mixtures = [layer.experts for layer in model.layers if isinstance(layer.experts, Mixture)]
    if not mixtures:
        return 0
    config, kept = mixtures[0].config, (mixtures[0].gate_up, mixtures[0].down)
    stacked = [weights for weights in kept if isinstance(weights, torch.Tensor)]
    if not stacked or not groups_on_device(*stacked):
        return config.num_experts
    # A rank may be sent the tokens of all, with every choice that they made.
    return min(config.num_experts, config.top_k * mixtures[0].exchange.ranks)


def step_bytes(
    c: LlamaConfig, dtype: torch.dtype, *, rows: int, width: int, tokens: int, context: int, experts: int = 0
) -> int:
    """What the largest step needs beside weights and cache, at most, roughly: activations of ``tokens`` tokens, logits
    of ``rows`` rows of ``width``, and the keys, values and scores of all rows, gathered for one layer.

    Decode graphs keep their memory, so that what a decode step takes is counted for them and for the general path.
    ``experts``: how many compute each token.
    """
    each = dtype.itemsize
    inner = c.intermediate_size
    summed = c.hidden_size
    if c.experts is not None:
        inner = max(inner, experts * c.experts.intermediate_size)
        # What each expert yields stands beside its weighted form.
        summed *= 1 + experts
    heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    activations = tokens * (4 * summed + 2 * heads + 4 * inner) * max(each, 4)
    # Of the graphs as computed, in float32, and in their buffer; where rows are sampled, six more in float32 at once.
    logits = rows * width * c.vocab_size * (each + 8 * 4)
    gathered = 2 * rows * context * 2 * c.num_kv_heads * c.head_dim * each
    # Of the graphs and of the general path, which adds a mask; of both in float32 before and after the softmax.
    scores = max(rows * width, QUERY_CHUNK) * c.num_heads * context * (3 * each + 4 * 4)
    return activations + logits + gathered + scores
