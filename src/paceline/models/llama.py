# SPDX-License-Identifier: Apache-2.0
"""The Llama family: RMS norm, rotary positions, grouped-query attention, gated SiLU.

The model knows nothing of requests or blocks. It is given a flat batch of tokens with their positions, and an
`Attend` that keeps each layer's keys and values and attends to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.models.experts import ExpertExchange, LocalExchange, Mixture, Pack, Packed, Take, Weight, as_it_is
from paceline.models.spec import LlamaConfig, RopeScaling, UnsupportedModel

GetTensor = Callable[[str], Tensor]
"""Name of a weight in Hugging Face's convention -> its tensor, in the dtype to run in."""

SMALL_BATCH = 64
"""Rows up to which the transposed product below is the faster one in float32 (measured on two x86-64 cores)."""


class Attend(Protocol):
    """Keeps the keys and values of ``layer`` for all tokens of the step, then attends to them.

    Shapes: ``q`` [tokens, heads, head_dim], ``k`` and ``v`` [tokens, kv_heads, head_dim], result
    [tokens, heads * head_dim].
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


@dataclass(slots=True)
class Taps:
    """Hidden states wanted on the way through a forward: the residual stream before each of ``layers``.

    ``layers`` are in rising order; the number of layers stands for what leaves the last one, before the final norm.
    ``states`` is filled by `Llama.forward` in that order, one [tokens, hidden_size] each.
    """

    layers: tuple[int, ...]
    states: list[Tensor] = field(default_factory=list)


W = TypeVar("W", bound=Weight)


@dataclass(frozen=True, slots=True)
class LlamaLayer(Generic[W]):
    """Weights of one decoder layer: ``qkv`` and ``gate_up`` are stacked by rows, each used in one product.

    ``qkv_bias`` [rows of qkv] and ``qk_norms`` [2, head_dim] (of queries, of keys) are None where a family lacks them.
    ``gate_up`` and ``down`` are empty where ``experts`` take their place.
    """

    attn_norm: Tensor
    qkv: W
    o: W
    mlp_norm: Tensor
    gate_up: W
    down: W
    qkv_bias: Tensor | None = None
    qk_norms: Tensor | None = None
    experts: Callable[[Tensor], Tensor] | None = None


def inverse_frequencies(theta: float, head_dim: int, scaling: RopeScaling | None) -> Tensor:
    """Rotary angle per position for each of the head_dim / 2 pairs, float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    freqs = 1.0 / (theta**exponents)
    if scaling is None:
        return freqs
    if scaling.kind == "linear":
        return freqs / scaling.factor
    if scaling.kind == "factors":
        return freqs / torch.tensor(scaling.factors, dtype=torch.float32)
    turns = scaling.original_max_position * freqs / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return freqs * (keep + (1.0 - keep) / scaling.factor)


def project(x: Tensor, weight: Tensor | Packed) -> Tensor:
    """``x`` [rows, in] times ``weight`` [out, in] transposed: [rows, out]. A packed weight does it its own way.

    Few rows in float32 on a CPU take the product as weight x x^T: the BLAS library then shares the rows of the
    weight among threads and reads each once, two to three times as fast as its path for few rows. It does so only
    if x itself is laid out by rows. One row is doubled: a matrix times a vector runs on a single thread.
    """
    if not isinstance(weight, Tensor):
        return weight(x)
    rows = x.shape[0]
    if rows > SMALL_BATCH or x.dtype != torch.float32 or x.device.type != "cpu":
        return F.linear(x, weight)
    if rows == 1:
        return torch.mm(weight, torch.cat((x, x)).t())[:, :1].t()
    return torch.mm(weight, x.contiguous().t()).t()


def taking(get: GetTensor) -> Take:
    """``get`` with its shapes checked; UnsupportedModel names a weight of another shape."""

    def take(name: str, *shape: int) -> Tensor:
        tensor = get(name)
        if tuple(tensor.shape) != shape:
            raise UnsupportedModel(f"{name}: the configuration asks for shape {shape}, found {tuple(tensor.shape)}")
        return tensor.contiguous()

    return take


def take_layer(
    c: LlamaConfig,
    take: Take,
    index: int,
    exchange: ExpertExchange | None = None,
    pack: Pack = as_it_is,
) -> LlamaLayer[Any]:
    """The weights of layer ``index``, stacked, those of products packed by ``pack``.

    Of a mixture these are the experts that this rank of ``exchange`` holds.
    """
    prefix = f"model.layers.{index}."
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    attn, mlp = prefix + "self_attn.", prefix + "mlp."
    parts = (("q", q), ("k", kv), ("v", kv))
    mixture = None
    if c.experts is not None and index not in c.experts.dense_layers:
        mixture = Mixture(c.experts, c.hidden_size, take, mlp, exchange or LocalExchange(), project, pack)
    size = c.intermediate_size
    gate_up = [] if mixture else [take(mlp + f"{name}_proj.weight", size, c.hidden_size) for name in ("gate", "up")]
    norms = [take(attn + f"{name}_norm.weight", c.head_dim) for name in ("q", "k")] if c.qk_norm else []
    return LlamaLayer(
        attn_norm=take(prefix + "input_layernorm.weight", c.hidden_size),
        qkv=pack(torch.cat([take(attn + f"{name}_proj.weight", rows, c.hidden_size) for name, rows in parts])),
        o=pack(take(attn + "o_proj.weight", c.hidden_size, q)),
        mlp_norm=take(prefix + "post_attention_layernorm.weight", c.hidden_size),
        gate_up=pack(torch.cat(gate_up)) if gate_up else torch.empty(0),
        down=torch.empty(0) if mixture else pack(take(mlp + "down_proj.weight", c.hidden_size, size)),
        qkv_bias=torch.cat([take(attn + f"{name}_proj.bias", rows) for name, rows in parts]) if c.qkv_bias else None,
        qk_norms=torch.stack(norms) if norms else None,
        experts=mixture,
    )


class Llama:
    """A decoder in plain torch; all methods run under ``torch.inference_mode``.

    ``dtype`` is that of the KV cache (and, here, unless weights are packed, of weights and activations);
    ``quantization`` of its weights, if any. ``exchange``: what the layers of a mixture share experts through, to be
    told of each forward; None in a dense model.
    """

    exchange: ExpertExchange | None = None
    device = torch.device("cpu")
    """Where its weights are, and what it computes."""

    def __init__(
        self,
        config: LlamaConfig,
        dtype: torch.dtype,
        get: GetTensor,
        exchange: ExpertExchange | None = None,
        pack: Pack = as_it_is,
    ) -> None:
        """Take every weight from ``get``, except experts that other ranks of ``exchange`` hold.

        ``pack``: how the weights of products are kept; activations have the dtype in which ``get`` yields the others.

        Raises:
            UnsupportedModel: a weight's shape contradicts the configuration.
        """
        self.config = config
        self.dtype = dtype
        self.quantization: str | None = None
        take = taking(get)
        vocabulary = (config.vocab_size, config.hidden_size)
        self.embedding = take("model.embed_tokens.weight", *vocabulary)
        if config.experts is not None:
            self.exchange = exchange or LocalExchange()
        self.layers = [take_layer(config, take, i, self.exchange, pack) for i in range(config.num_layers)]
        self.final_norm = take("model.norm.weight", config.hidden_size)
        self.head = pack(self.embedding if config.tie_word_embeddings else take("lm_head.weight", *vocabulary))
        self.device = self.final_norm.device
        self._rotary = inverse_frequencies(config.rope_theta, config.head_dim, config.rope_scaling).to(self.device)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [tokens, 1, head_dim] for `rotate`; the sines carry the sign of each half."""
        angles = positions.to(torch.float32)[:, None] * self._rotary
        cos, sin = angles.cos(), angles.sin()
        return (
            torch.cat((cos, cos), -1)[:, None].to(self.final_norm.dtype),
            torch.cat((-sin, sin), -1)[:, None].to(self.final_norm.dtype),
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [tokens, hidden_size] of ids in [0, vocab_size)."""
        return F.embedding(tokens, self.embedding)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, taps: Taps | None = None) -> Tensor:
        """Hidden states [tokens, hidden_size] after the final norm; ``taps``, if given, is filled.

        ``tokens`` and ``positions`` are int64 [tokens]; every id must lie in [0, vocab_size).
        """
        c = self.config
        size, eps = (c.hidden_size,), c.rms_norm_eps
        rotated = c.num_heads + c.num_kv_heads
        cos, sin = self._rotation(positions)
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            if taps is not None and i in taps.layers:
                taps.states.append(x)
            h = F.rms_norm(x, size, layer.attn_norm, eps)
            qkv = project(h, layer.qkv)
            if layer.qkv_bias is not None:
                qkv = qkv + layer.qkv_bias
            qkv = qkv.view(-1, rotated + c.num_kv_heads, c.head_dim)
            qk = qkv[:, :rotated]
            if layer.qk_norms is not None:
                qk = torch.cat(
                    [
                        F.rms_norm(part, (c.head_dim,), weight, eps)
                        for part, weight in zip(qk.split([c.num_heads, c.num_kv_heads], 1), layer.qk_norms, strict=True)
                    ],
                    1,
                )
            qk = rotate(qk, cos, sin)
            out = attend(i, qk[:, : c.num_heads], qk[:, c.num_heads :], qkv[:, rotated:])
            x = x + project(out, layer.o)
            h = F.rms_norm(x, size, layer.mlp_norm, eps)
            if layer.experts is not None:
                x = x + layer.experts(h)
                continue
            gate, up = project(h, layer.gate_up).split(c.intermediate_size, -1)
            x = x + project(F.silu(gate) * up, layer.down)
        if taps is not None and c.num_layers in taps.layers:
            taps.states.append(x)
        return F.rms_norm(x, size, self.final_norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocab_size], float32, of hidden states [rows, hidden_size]."""
        # A draft model's hidden states may be float32 where this model's are not.
        return project(hidden.to(self.head.dtype) if isinstance(self.head, Tensor) else hidden, self.head).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in half-split order: pair i is (x[i], x[i + head_dim / 2])."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
