# SPDX-License-Identifier: Apache-2.0
"""The Llama family on CPUs at speed: weights in int8 or bfloat16, and a step's layers in one compiled call.

int8: weights are rounded symmetrically, with one scale per output channel; activations are rounded as they come,
with one scale per token, so that no token's result depends on the rest of its batch; both are first mixed by a
Hadamard matrix, which leaves their product as it is and takes the outliers out of them. Products accumulate in int32,
which is exact. The residual stream, norms, rotation and activation stay in float32; the KV cache is bfloat16.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.models import decoder, kernels
from paceline.models.codegen import BFLOAT16, INT8, PANEL
from paceline.models.kernels import Array
from paceline.models.llama import Attend, GetTensor, Llama, Taps, inverse_frequencies, take_layer, taking
from paceline.models.paged import PagedRows, attend_alone
from paceline.models.spec import LlamaConfig
from paceline.models.team import shared_team

_NO_TAPS = np.empty((0, 0, 0), dtype=np.float32)


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``weight`` as int8 with one float32 scale per row, largest magnitude 127."""
    scale = weight.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return torch.round(weight / scale[:, None]).to(torch.int8), scale


def mix_columns(weight: Tensor) -> Tensor:
    """``weight`` [out, in] for inputs that `kernels` has mixed: products with them are those of the original."""
    rows, size = weight.shape
    order = min(size & -size, kernels.MIXED)
    matrix = torch.ones(1, 1)
    while len(matrix) < order:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    quarters = 4 if order == kernels.MIXED else 1
    groups = weight.view(rows, quarters, -1, order // quarters).transpose(1, 2)
    mixed = groups.reshape(rows, -1, order) @ (matrix / order)
    return mixed.view(groups.shape).transpose(1, 2).reshape(rows, size)


def _up(size: int, multiple: int = PANEL) -> int:
    return -(-size // multiple) * multiple


class Packed:
    """Weights [out, in] of equal shape, one a layer, as `products.multiply` takes them: see `arrays`."""

    def __init__(self, layers: int, out: int, size: int, int8: bool) -> None:
        self._each = 4 if int8 else 2
        panels, groups = -(-out // PANEL), -(-size // self._each)
        self._words = np.zeros((layers, panels, groups, PANEL), dtype=np.int32)
        self._start = np.zeros((layers, panels * PANEL), dtype=np.int32)
        self._scale = np.ones((layers, panels * PANEL), dtype=np.float32)
        self.groups = groups
        self.width = panels * PANEL

    def put(self, layer: int, weight: Tensor) -> None:
        """Round and pack one layer's weight."""
        rows, size = weight.shape
        padded = torch.zeros(self.width, self.groups * self._each)
        if self._each == 4:
            rounded, scale = quantise_rows(mix_columns(weight.float()))
            self._scale[layer, :rows] = scale.numpy()
            # Encoded rows are unsigned bytes, 128 more than the number they stand for.
            self._start[layer, :rows] = -128 * rounded.sum(1, dtype=torch.int32).numpy()
            padded = padded.to(torch.int8)
            padded[:rows, :size] = rounded
        else:
            padded = padded.to(torch.bfloat16)
            padded[:rows, :size] = weight
        words = padded.view(torch.int32).numpy()
        self._words[layer] = words.reshape(-1, PANEL, self.groups).transpose(0, 2, 1)

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        """Words [layers, panels, groups, PANEL]; what sums start from, and scales, [layers * panels * PANEL]."""
        return self._words, self._start.reshape(-1), self._scale.reshape(-1)


class PackedLinear:
    """A weight [out, in], packed: rows [tokens, in] float32 -> their products with it, [tokens, out] float32."""

    def __init__(self, weight: Tensor, int8: bool) -> None:
        """``int8``: else bfloat16."""
        self._kind = INT8 if int8 else BFLOAT16
        self._out = weight.shape[0]
        self._packed = Packed(1, weight.shape[0], weight.shape[1], int8)
        self._packed.put(0, weight)

    def __call__(self, x: Tensor) -> Tensor:
        count, packed = len(x), self._packed
        out = torch.empty(count, packed.width)
        words, scale = np.empty(count * packed.groups, dtype=np.int32), np.empty(count, dtype=np.float32)
        rows = x.contiguous().numpy()
        shared_team().run(decoder.project, 2, self._kind, rows, words, packed.arrays, scale, out.numpy())
        return out[:, : self._out]


class _Embedding:
    """Token embeddings: int8 with one scale per token, or bfloat16."""

    def __init__(self, table: Tensor, int8: bool) -> None:
        self._scale: Array | None = None
        if int8:
            rounded, scale = quantise_rows(table.float())
            self._table, self._scale = rounded.numpy(), scale.numpy()
        else:
            self._table = table.to(torch.bfloat16).contiguous().view(torch.uint16).numpy()

    def __call__(self, tokens: Tensor) -> Tensor:
        out = torch.empty(len(tokens), self._table.shape[1])
        ids = tokens.contiguous().numpy()
        if self._scale is None:
            kernels.look_up_halves(self._table, ids, out.numpy())
        else:
            kernels.look_up_bytes(self._table, self._scale, ids, out.numpy())
        return out


def _array(tensor: Tensor) -> Array:
    array: Array = tensor.float().contiguous().numpy()
    return array


class FusedLlama(Llama):
    """A decoder whose weights are packed as they are taken, one layer after the other: there is no second copy."""

    def __init__(self, config: LlamaConfig, get: GetTensor, *, int8: bool) -> None:
        """Take every weight from ``get``; ``int8``: else bfloat16.

        Raises:
            UnsupportedModel: a weight's shape contradicts the configuration.
        """
        self.config = c = config
        self.dtype = torch.bfloat16
        self.quantization = "int8" if int8 else None
        self._kind = INT8 if int8 else BFLOAT16
        self._team = shared_team()
        take = taking(get)
        vocabulary = (c.vocab_size, c.hidden_size)
        table = take("model.embed_tokens.weight", *vocabulary)
        self._embed = _Embedding(table, int8)
        self._head = PackedLinear(table if c.tie_word_embeddings else take("lm_head.weight", *vocabulary), int8)
        del table
        self._weights = self._take_layers(get, int8)
        self._final_norm = _array(take("model.norm.weight", c.hidden_size))
        self._rotary = inverse_frequencies(c.rope_theta, c.head_dim, c.rope_scaling)
        _give_back()

    def _take_layers(self, get: GetTensor, int8: bool) -> tuple[Any, ...]:
        """All layers' weights as `decoder.run_layers` takes them."""
        c = self.config
        q, kv, inner = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, _up(c.intermediate_size)
        shapes = ((q + 2 * kv, c.hidden_size), (c.hidden_size, q), (2 * inner, c.hidden_size), (c.hidden_size, inner))
        qkv, o, gate_up, down = packed = [Packed(c.num_layers, *shape, int8) for shape in shapes]
        attn_norms, mlp_norms, biases, norms = [], [], [], []
        for i in range(c.num_layers):
            layer = take_layer(c, taking(get), i)
            qkv.put(i, layer.qkv)
            o.put(i, layer.o)
            gate_up.put(i, _interleaved(layer.gate_up, inner))
            down.put(i, torch.nn.functional.pad(layer.down.float(), (0, inner - c.intermediate_size)))
            attn_norms.append(layer.attn_norm)
            mlp_norms.append(layer.mlp_norm)
            biases.append(torch.empty(0) if layer.qkv_bias is None else layer.qkv_bias)
            norms.append(torch.empty(2, 0) if layer.qk_norms is None else layer.qk_norms)
        small = (_array(torch.stack(tensors)) for tensors in (attn_norms, mlp_norms, biases, norms))
        return *small, *(weight.arrays for weight in packed)

    def embed(self, tokens: Tensor) -> Tensor:
        """See `Llama.embed`; the result is float32."""
        return self._embed(tokens)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, taps: Taps | None = None) -> Tensor:
        """See `Llama.forward`; the result is float32, and so are the states that are tapped.

        With an ``attend`` that reads a bfloat16 cache all layers are one compiled call.
        """
        c = self.config
        hidden = torch.empty(len(tokens), c.hidden_size)
        rows, tapped = self._rows(tokens, positions, taps)
        paged = getattr(attend, "paged", None)
        if isinstance(paged, PagedRows):
            phases = c.num_layers * decoder.PHASES
            at = (self._kind, c.rms_norm_eps, c.num_heads, self._weights, rows, paged.arrays)
            self._team.run(decoder.run_layers, phases, *at)
        else:
            self._run_layers(rows, attend)
        x, y = rows[:2]
        kernels.final_norm(x, y, self._final_norm, c.rms_norm_eps, hidden.numpy())
        if taps is not None:
            if c.num_layers in taps.layers:
                tapped[-1] = x
            taps.states.extend(torch.from_numpy(tapped))
        return hidden

    def _run_layers(self, rows: tuple[Array, ...], attend: Attend) -> None:
        """Layer after layer, around an attention of any kind."""
        c = self.config
        qkv, attended = rows[2], rows[4]
        q, both = c.num_heads, c.num_heads + c.num_kv_heads
        for i in range(c.num_layers):
            self._team.run(decoder.open_layer, 3, self._kind, c.rms_norm_eps, c.num_heads, i, self._weights, rows)
            width = (both + c.num_kv_heads) * c.head_dim
            heads = torch.from_numpy(qkv)[:, :width].unflatten(1, (-1, c.head_dim))
            attended[:] = attend(i, heads[:, :q], heads[:, q:both], heads[:, both:]).numpy()
            self._team.run(decoder.close_layer, 6, self._kind, c.rms_norm_eps, i, self._weights, rows)

    def _rows(self, tokens: Tensor, positions: Tensor, taps: Taps | None) -> tuple[tuple[Array, ...], Array]:
        """What `decoder.run_layers` calls ``rows``, and the taps in it."""
        c = self.config
        count, q = len(tokens), c.num_heads * c.head_dim
        qkv, o = self._weights[4:6]
        widths = tuple(weight[0].shape[1] * PANEL for weight in (qkv, o))
        inner = _up(c.intermediate_size)
        groups = max(weight[0].shape[2] for weight in self._weights[4:])
        tap_of = np.full(c.num_layers + 1, -1, dtype=np.int64)
        tapped = _NO_TAPS
        if taps is not None:
            tap_of[list(taps.layers)] = range(len(taps.layers))
            tapped = np.empty((len(taps.layers), count, c.hidden_size), dtype=np.float32)
        angles = positions.to(torch.float32)[:, None] * self._rotary

        def empty(*shape: int) -> Array:
            return np.empty(shape, dtype=np.float32)

        return (
            self._embed(tokens).numpy(),
            np.zeros((count, widths[1]), dtype=np.float32),
            empty(count, widths[0]),
            np.empty((c.num_kv_heads, count, c.num_heads // c.num_kv_heads, c.head_dim // 2), dtype=np.int32),
            empty(count, q),
            empty(count, inner),
            np.empty(count * groups, dtype=np.int32),
            empty(count),
            angles.cos().numpy(),
            angles.sin().numpy(),
            tapped,
            tap_of,
        ), tapped

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Llama.logits`."""
        return self._head(hidden)


def _give_back() -> None:
    """Return memory that packing has freed to the system, which glibc would keep: a quarter of a small model's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _interleaved(gate_up: Tensor, inner: int) -> Tensor:
    """Gate above up -> PANEL rows of gate, PANEL rows of up, and so on; each padded to ``inner`` rows."""
    size = gate_up.shape[0] // 2
    both = torch.zeros(2, inner, gate_up.shape[1])
    both[:, :size] = gate_up.view(2, size, -1)
    return both.view(2, -1, PANEL, gate_up.shape[1]).transpose(0, 1).reshape(2 * inner, -1)


def compile_all() -> None:
    """Compile every kernel of this path, or load it from Numba's cache: half a minute on two cores the first time.

    For set-up programs, so that the first start of a server does not wait for it.
    """
    c = LlamaConfig(
        vocab_size=PANEL,
        hidden_size=PANEL,
        intermediate_size=PANEL,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        max_position=16,
        tie_word_embeddings=True,
    )
    cache = np.zeros((1, 2, 2, 1, 16, 16), dtype=np.uint16)
    rows = PagedRows.of(cache, [(0, 1, np.array([1]))])

    class Paged:
        paged: PagedRows | None = rows

        def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            qkv = torch.cat((q, k, v), 1).flatten(1).numpy()
            return torch.from_numpy(attend_alone(shared_team(), rows, layer, c.num_heads, qkv))

    attend, first = Paged(), torch.zeros(1, dtype=torch.int64)
    for int8 in (True, False):
        model = FusedLlama(c, lambda name: torch.ones(_shapes(c)[name.split(".")[-2]]), int8=int8)
        for attend.paged in (rows, None):
            model.logits(model.forward(first, first, attend))


def _shapes(c: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Of a decoder's weights, by the last but one part of their names."""
    q, kv, hidden, inner = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size, c.intermediate_size
    norms = ("norm", "input_layernorm", "post_attention_layernorm")
    return {
        "embed_tokens": (c.vocab_size, hidden),
        "q_proj": (q, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, q),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    } | dict.fromkeys(norms, (hidden,))
