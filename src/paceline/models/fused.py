# SPDX-License-Identifier: Apache-2.0
"""The Llama family on CPUs at speed: weights in int8 or bfloat16, everything between the products fused.

int8: weights are rounded symmetrically, with one scale per output channel; activations are rounded as they come,
with one scale per token, so that no token's result depends on the rest of its batch; both are first mixed by a
Hadamard matrix, which leaves their product as it is and takes the outliers out of them. Products accumulate in int32,
which is exact. The residual stream, norms, rotation and activation stay in float32; the KV cache is bfloat16.
"""

from __future__ import annotations

import warnings
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.models import kernels
from paceline.models.llama import Attend, GetTensor, Llama, inverse_frequencies, take_layer, taking
from paceline.models.spec import LlamaConfig

ZERO_POINT = 128
"""Where 0 of an activation lies among the unsigned bytes that the int8 product takes."""


def activation_levels() -> float:
    """Magnitudes of a rounded activation.

    Without VNNI, pairs of byte products are added in 16 bits, which would saturate at full range.
    """
    return 127.0 if torch.cpu._is_vnni_supported() else 63.0


class Linear(Protocol):
    """A weight [out, in]: rows [tokens, in] -> [tokens, out] float32.

    ``levels``: how its input is to be scaled, as `kernels` says; the caller applies the scales to the result.
    """

    levels: float

    def __call__(self, x: Tensor) -> Tensor: ...


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``weight`` as int8 with one float32 scale per row, largest magnitude 127."""
    scale = weight.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return torch.round(weight / scale[:, None]).to(torch.int8), scale


def mix_columns(weight: Tensor) -> Tensor:
    """``weight`` [out, in] for inputs that `kernels` has mixed: products with them are those of the original."""
    rows, size = weight.shape
    order = min(size & -size, 64)
    matrix = torch.ones(1, 1)
    while len(matrix) < order:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (matrix / order @ weight.view(rows, order, -1)).view(rows, size)


class Int8Linear:
    """A weight packed for FBGEMM's product of unsigned and signed bytes."""

    def __init__(self, weight: Tensor) -> None:
        self.levels = activation_levels()
        rounded, scale = quantise_rows(mix_columns(weight.float()))
        zeros = torch.zeros(len(scale), dtype=torch.int64)
        with warnings.catch_warnings():
            # The packing takes a quantised tensor, and nothing else; torch is pinned to a version that has both.
            warnings.filterwarnings("ignore", message=".*deprecated", category=UserWarning)
            stored = torch._make_per_channel_quantized_tensor(rounded, scale, zeros, 0)
        self._packed = torch.ops.quantized.linear_prepack(stored, None)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(x, 1.0, ZERO_POINT, self._packed)
        return y


class BFloat16Linear:
    """A weight in bfloat16, and so the rows that it multiplies."""

    levels = 0.0

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.to(torch.bfloat16)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(torch.bfloat16), self._weight).float()


class _Embedding:
    """Token embeddings: int8 with one scale per token, or bfloat16."""

    def __init__(self, table: Tensor, scale: Tensor | None) -> None:
        self._table = table
        self._scale = scale

    def __call__(self, tokens: Tensor) -> Tensor:
        rows = self._table[tokens].float()
        return rows if self._scale is None else rows * self._scale[tokens][:, None]


class _Layer:
    """One decoder layer, packed."""

    def __init__(self, config: LlamaConfig, get: GetTensor, index: int, int8: bool) -> None:
        layer = take_layer(config, taking(get), index)
        self.qkv, self.o, self.gate_up, self.down = (
            _packed(weight, int8) for weight in (layer.qkv, layer.o, layer.gate_up, layer.down)
        )
        self.attn_norm = _array(layer.attn_norm)
        self.mlp_norm = _array(layer.mlp_norm)
        width = layer.qkv.shape[0]
        self.bias = _array(torch.zeros(width) if layer.qkv_bias is None else layer.qkv_bias)
        self.norms = _array(torch.empty(2, 0) if layer.qk_norms is None else layer.qk_norms)


def _packed(weight: Tensor, int8: bool) -> Linear:
    return Int8Linear(weight) if int8 else BFloat16Linear(weight)


def _array(tensor: Tensor) -> Any:
    return tensor.float().contiguous().numpy()


class FusedLlama(Llama):
    """A decoder whose weights are packed as they are taken, one layer after the other: there is no second copy."""

    def __init__(self, config: LlamaConfig, get: GetTensor, *, int8: bool) -> None:
        """Take every weight from ``get``; ``int8``: else bfloat16.

        Raises:
            UnsupportedModel: a weight's shape contradicts the configuration.
        """
        self.config = config
        self.dtype = torch.bfloat16
        self.quantization = "int8" if int8 else None
        take = taking(get)
        vocabulary = (config.vocab_size, config.hidden_size)
        table = take("model.embed_tokens.weight", *vocabulary)
        head: Linear | None
        if int8:
            rounded, scale = quantise_rows(table.float())
            self._embed = _Embedding(rounded, scale)
            head = Int8Linear(table) if config.tie_word_embeddings else None
        else:
            table = table.to(torch.bfloat16)
            self._embed = _Embedding(table, None)
            head = BFloat16Linear(table) if config.tie_word_embeddings else None
        del table
        self._head: Linear = head or _packed(take("lm_head.weight", *vocabulary), int8)
        self._layers = [_Layer(config, get, i, int8) for i in range(config.num_layers)]
        self._final_norm = _array(take("model.norm.weight", config.hidden_size))
        self._rotary = inverse_frequencies(config.rope_theta, config.head_dim, config.rope_scaling)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `Llama.forward`; the result is float32."""
        c = self.config
        count, eps = len(tokens), c.rms_norm_eps
        width = c.num_heads * c.head_dim
        split = width + c.num_kv_heads * c.head_dim
        angles = positions.to(torch.float32)[:, None] * self._rotary
        cos, sin = angles.cos().numpy(), angles.sin().numpy()
        x = self._embed(tokens).numpy()
        hidden = torch.empty(count, c.hidden_size)
        inner = torch.empty(count, c.intermediate_size)
        h, act = hidden.numpy(), inner.numpy()
        y, scale = torch.zeros(count, c.hidden_size).numpy(), torch.ones(count).numpy()
        for i, layer in enumerate(self._layers):
            kernels.add_norm(x, y, scale, layer.attn_norm, eps, layer.qkv.levels, h, scale)
            qkv = layer.qkv(hidden)
            kernels.rotate(qkv.numpy(), scale, layer.bias, layer.norms, eps, cos, sin, c.num_heads, c.num_kv_heads)
            heads = qkv.view(count, -1, c.head_dim)
            out = attend(
                i, heads[:, : c.num_heads], heads[:, c.num_heads : split // c.head_dim], heads[:, split // c.head_dim :]
            )
            kernels.scale_rows(out.numpy(), layer.o.levels, scale)
            y = layer.o(out).numpy()
            kernels.add_norm(x, y, scale, layer.mlp_norm, eps, layer.gate_up.levels, h, scale)
            kernels.gated(layer.gate_up(hidden).numpy(), scale, layer.down.levels, act, scale)
            y = layer.down(inner).numpy()
        kernels.add_norm(x, y, scale, self._final_norm, eps, 0.0, h, scale)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Llama.logits`."""
        rows = hidden.clone()
        scale = torch.empty(len(rows))
        kernels.scale_rows(rows.numpy(), self._head.levels, scale.numpy())
        return self._head(rows).mul_(scale[:, None])
