# SPDX-License-Identifier: Apache-2.0
"""Models with random weights, of any size, made in memory: the same numbers on every device."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.models.eagle3 import Eagle3, Eagle3Config
from paceline.models.experts import ExpertExchange
from paceline.models.llama import Llama
from paceline.models.spec import ExpertConfig, LlamaConfig

Weights = Callable[[str], Tensor]
"""Gives the weight of a name."""

TINY = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position=2048,
    tie_word_embeddings=False,
)
TINY_MIXTURE = replace(TINY, experts=ExpertConfig(num_experts=4, top_k=2, intermediate_size=48, normalise=True))
SMOLLM2 = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=1e5,
    max_position=8192,
    tie_word_embeddings=True,
)
"""The shape of SmolLM2-135M."""


def random_model(
    config: LlamaConfig,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    seed: int = 0,
    exchange: ExpertExchange | None = None,
) -> Llama:
    """A model in plain torch, whose logits are far from flat."""
    weights = random_weights(config, seed)
    return Llama(config, dtype, lambda name: weights(name).to(device=device, dtype=dtype), exchange)


def random_weights(config: LlamaConfig, seed: int = 0) -> Weights:
    """The weights of such a model, in float32, by Hugging Face's names."""
    return lambda name: _weight(name, _shape(config, name), seed)


def random_head(target: Llama, *, taps: Sequence[int] | None = None, seed: int = 0) -> Eagle3:
    """An EAGLE-3 model for ``target``, where that is; ``taps``: an early, a middle and a late layer if not given."""
    c = target.config
    chosen = tuple(taps or (0, c.num_layers // 2, c.num_layers - 1))
    decoder = replace(c, num_layers=1, experts=None, qkv_bias=False, qk_norm=False)
    shape = Eagle3Config(decoder, c.vocab_size, c.hidden_size, chosen)

    def get(name: str) -> Tensor:
        size = (c.hidden_size, len(chosen) * c.hidden_size) if name == "fc.weight" else _shape(decoder, name)
        return _weight("head " + name, size, seed).to(device=target.device, dtype=target.dtype)

    return Eagle3(shape, target, get, {"lm_head.weight"}, target.dtype)


def _weight(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Numbers that depend on nothing but the arguments; norms are near 1."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))
    numbers = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1.0 + 0.1 * numbers
    return numbers * (2.0 * shape[-1] ** -0.5 if len(shape) == 2 else 0.2)


def _shape(c: LlamaConfig, name: str) -> tuple[int, ...]:
    """Of the weight or bias ``name``, in Hugging Face's convention, or of EAGLE-3's layer."""
    kind = name.split(".")[-2]
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    inner = c.intermediate_size
    if c.experts is not None and ".experts." in name:
        inner = c.experts.intermediate_size
    elif c.experts is not None and "shared_expert." in name:
        inner = c.experts.shared_intermediate_size
    size = c.hidden_size
    entering = 2 * size if name.startswith("midlayer.self_attn.") else size
    rows = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    if kind in rows:
        return (rows[kind],) if name.endswith("bias") else (rows[kind], entering)
    if kind in ("q_norm", "k_norm"):
        return (c.head_dim,)
    experts = c.experts.num_experts if c.experts is not None else 0
    shapes = {
        "embed_tokens": (c.vocab_size, size),
        "lm_head": (c.vocab_size, size),
        "o_proj": (size, q),
        "gate_proj": (inner, size),
        "up_proj": (inner, size),
        "down_proj": (size, inner),
        "gate": (experts, size),
        "shared_expert_gate": (1, size),
    }
    return shapes.get(kind, (size,))
