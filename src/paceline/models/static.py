# SPDX-License-Identifier: Apache-2.0
"""The static backend of FULL decode steps on CPUs, for mixtures of experts in int8.

Whatever depends on a shape is settled when the backend is made: buffers for the largest step and, for each number of
tokens that a step may have, the views of them that compiled code takes. A step fills in tokens, positions and block
tables, and makes two compiled calls a layer: up to the router, and the experts; between and after them tokens go
through the exchange, in its planned form. No row of padding is computed, since on a CPU it would cost what a real one
does: the size that ranks agree on fixes what they exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.models import kernels
from paceline.models.codegen import PANEL
from paceline.models.experts import LocalExchange, Mixture, Placement
from paceline.models.kernels import Array
from paceline.models.llama import Attend, Llama, LlamaLayer, Taps
from paceline.models.paged import QUERY_TOKENS
from paceline.models.planned import Tokens, planned
from paceline.models.static_kernels import EXPERT_PHASES, OPEN_PHASES, open_layer, run_experts
from paceline.models.static_weights import Arrays, SharedLinear
from paceline.models.team import shared_team

Rows = Sequence[tuple[int, int, Array]]
"""First position, number of tokens, and block table (int64) of each row."""

Around = Callable[[Attend], Attend]
"""Wraps each layer's attention; the queries, keys and values that it sees are empty."""

_NONE = torch.empty(0)


@dataclass(frozen=True, slots=True)
class StaticLimits:
    """Steps that are planned for: up to ``max_rows`` rows of ``width`` tokens each, with contexts of up to
    ``max_blocks`` blocks. ``taps``: see `Taps`."""

    width: int
    max_rows: int
    max_blocks: int
    taps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Plan:
    """Views for steps of one number of tokens: ``rows`` and ``at`` as `open_layer` takes them, and tensors over them.

    ``nothing``: what precedes the first layer, zeros. ``row_of``: each token's row. ``routed``: parts of ``rows``.
    """

    rows: tuple[Array, ...]
    at: tuple[Array, ...]
    nothing: Array
    row_of: Array
    x: Tensor
    angles: Tensor
    cos: Tensor
    sin: Tensor
    routed: Tokens
    tapped: tuple[Tensor, ...]
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class _Experts:
    """Experts of one layer as `run_experts` takes them; ``out`` has room for all tokens that may arrive."""

    first: int
    inner: int
    gate_up: Arrays
    down: Arrays
    buffers: tuple[Array, ...]
    out: Array


@dataclass(frozen=True, slots=True)
class _Layer:
    """``weights`` as `open_layer` takes them.

    ``own``: this rank's experts; None if it has none. ``every``: what computes every token, a shared expert or, without
    a ``mixture``, the layer's MLP.
    """

    weights: tuple[Any, ...]
    tap: int
    mixture: Mixture | None
    own: _Experts | None
    every: _Experts | None


class StaticMixture:
    """Runs decode steps of a model as its own `forward` would, bit for bit: see `static_general`.

    Results are views of buffers that the next step overwrites. No weight is held twice.
    """

    def __init__(self, model: Llama, cache: Array, limits: StaticLimits) -> None:
        """``cache``: the KV cache's bits, as `paged.PagedRows` describes them. `supports` must hold."""
        assert model.config.experts is not None
        self._model, self._cache, self._limits = model, cache, limits
        self._experts = model.config.experts
        self._exchange = model.exchange or LocalExchange()
        self._team = shared_team()
        self._tokens = limits.width * limits.max_rows
        self._pool: dict[str, Array] = {}
        self._layers = [self._bind(i, layer) for i, layer in enumerate(model.layers)]
        parts = (
            [layer.attn_norm for layer in model.layers],
            [layer.mlp_norm for layer in model.layers],
            [_NONE if layer.qkv_bias is None else layer.qkv_bias for layer in model.layers],
            [_NONE.view(2, 0) if layer.qk_norms is None else layer.qk_norms for layer in model.layers],
        )
        self._norms = tuple(torch.stack(part).numpy() for part in parts)
        self._final_norm = model.final_norm.numpy()
        self._ones = np.ones((self._tokens, 1), dtype=np.float32)
        self._zeros = np.zeros((self._tokens, 1), dtype=np.int64)
        # Largest first: it makes the buffers of which the others are parts.
        self._plans = {n: self._plan(n) for n in range(self._tokens, 0, -limits.width)}
        hidden, experts, weights = self._plans[limits.width].routed
        self._nobody = hidden[:0], experts[:0], weights[:0]
        placement = Placement(self._experts.num_experts, self._exchange.ranks)
        size, top_k = model.config.hidden_size, self._experts.top_k
        self._planned = planned(self._exchange, self._tokens, size, placement, top_k)

    @staticmethod
    def supports(model: Llama) -> bool:
        """Whether it is a mixture in int8."""
        mixture = model.config.experts is not None
        return mixture and all(isinstance(layer.qkv, SharedLinear) for layer in model.layers)

    def forward(
        self, tokens: Tensor, positions: Tensor, rows: Rows, taps: Taps | None = None, around: Around | None = None
    ) -> Tensor | None:
        """Hidden states [tokens, hidden_size] after the final norm; ``taps``, if given, is filled.

        ``tokens`` and ``positions`` as in `Llama.forward`, those of ``rows`` one after the other. None: these rows are
        not planned for, and nothing was done.
        """
        plan = self._fill(rows)
        if plan is None or (taps is not None and taps.layers != self._limits.taps):
            return None
        model, c = self._model, self._model.config
        torch.index_select(model.embedding, 0, tokens, out=plan.x)
        torch.mul(positions.to(torch.float32)[:, None], model._rotary, out=plan.angles)
        torch.cos(plan.angles, out=plan.cos)
        torch.sin(plan.angles, out=plan.sin)
        added = plan.nothing
        terms = c.rms_norm_eps, c.num_heads

        def opened(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            bound, normed = self._layers[layer], self._experts.normalise
            at = *terms, layer, bound.tap, added, self._norms, bound.weights, normed, plan.rows, plan.at
            self._team.run(open_layer, OPEN_PHASES, *at)
            return _NONE

        attend = opened if around is None else around(opened)
        for i, layer in enumerate(self._layers):
            attend(i, _NONE, _NONE, _NONE)
            added = self._close(layer, plan.routed, plan.rows[-1])
        kernels.final_norm(plan.rows[0], added, self._final_norm, c.rms_norm_eps, plan.hidden.numpy())
        if taps is not None:
            taps.states.extend(plan.tapped)
        return plan.hidden

    def idle(self) -> None:
        """A step without rows: the experts serve those of other ranks."""
        for layer in self._layers:
            if layer.mixture is not None:
                self._mix(layer, self._nobody)

    def _fill(self, rows: Rows) -> _Plan | None:
        """The plan for these rows, with their block tables in it; None if there is none."""
        width = self._limits.width
        plan = self._plans.get(width * len(rows))
        if plan is None:
            return None
        block_size = self._cache.shape[4]
        _, blocks, offsets, tables, tiles = plan.at
        positions = np.empty(len(rows), dtype=np.int64)
        for i, (start, n, table) in enumerate(rows):
            used = -(-(start + n) // block_size)
            if n != width or used > min(self._limits.max_blocks, len(table)):
                return None
            tables[i, :used] = table[:used]
            positions[i] = start
        every = (positions[:, None] + np.arange(width)).reshape(-1)
        blocks[:] = tables[plan.row_of, every // block_size]
        offsets[:] = every % block_size
        tiles[:, 2] = every[tiles[:, 1]]
        return plan

    def _close(self, layer: _Layer, routed: Tokens, gates: Array) -> Array:
        """What the mixture, or the MLP in its place, adds to the residual stream; ``gates``: a shared expert's."""
        hidden, experts, _ = routed
        if layer.mixture is None:
            assert layer.every is not None
            return self._run(layer.every, (hidden, self._zeros[: len(gates)], self._ones[: len(gates)]))
        inert = self._exchange.inert
        if inert is not None:
            experts[inert.numpy()] = self._experts.num_experts
        out = self._mix(layer, routed)
        if layer.mixture.shared is not None:
            assert layer.every is not None
            out = out + self._run(layer.every, (hidden, self._zeros[: len(gates)], gates))
        return out

    def _mix(self, layer: _Layer, routed: Tokens) -> Array:
        """The weighted sums of experts on all ranks for this one's tokens."""
        arrived = self._planned.dispatch(routed)
        partial = np.zeros_like(arrived[0]) if layer.own is None else self._run(layer.own, arrived)
        return self._planned.combine(partial)

    def _run(self, experts: _Experts, tokens: Tokens) -> Array:
        """Weighted sums [tokens, hidden_size] of ``experts``, in their ``out``."""
        count = len(tokens[0])
        if count > len(experts.out):
            raise ValueError(f"{count} tokens came to this rank's experts, and {len(experts.out)} are planned for")
        out = experts.out[:count]
        weights = experts.gate_up, experts.down, experts.buffers
        self._team.run(run_experts, EXPERT_PHASES, experts.first, experts.inner, *tokens, *weights, out)
        return out

    def _bind(self, index: int, layer: LlamaLayer[Any]) -> _Layer:
        c = self._model.config
        tap = self._limits.taps.index(index) if index in self._limits.taps else -1
        mixture = layer.experts if isinstance(layer.experts, Mixture) else None
        own = every = None
        router = gate = np.empty((0, c.hidden_size), dtype=np.float32)
        if mixture is None:
            every = self._place("every", 0, c.intermediate_size, [layer.gate_up], [layer.down])
        else:
            router = mixture.router.numpy()
            if mixture.own:
                inner = self._experts.intermediate_size
                own = self._place("own", mixture.own.start, inner, mixture.gate_up, mixture.down)
            if mixture.shared is not None:
                gate = mixture.shared.gate.numpy()
                inner = self._experts.shared_intermediate_size
                every = self._place("every", 0, inner, [mixture.shared.gate_up], [mixture.shared.down])
        return _Layer((layer.qkv.arrays, layer.o.arrays, router, gate), tap, mixture, own, every)

    def _place(self, use: str, first: int, inner: int, gate_up: Any, down: Any) -> _Experts:
        """Experts with their scratch memory, which all layers share."""
        packed = SharedLinear.join(gate_up), SharedLinear.join(down)
        travels = use == "own"
        tokens = self._tokens * (self._exchange.ranks if travels else 1)
        top_k = self._experts.top_k if travels else 1
        rows = tokens * min(top_k, len(gate_up))
        both, y = (weight[0].shape[1] * PANEL for weight in packed)
        groups = max(weight[0].shape[2] for weight in packed)
        name = f"{use} {inner} {len(gate_up)} "
        buffers = (
            self._buffer(name + "bounds", np.int64, len(gate_up) + 1),
            self._buffer(name + "places", np.int64, tokens, top_k),
            self._buffer(name + "words", np.int32, rows * groups),
            self._buffer(name + "scale", np.float32, rows),
            self._buffer(name + "both", np.float32, rows, both),
            self._buffer(name + "y", np.float32, rows, y),
        )
        out = self._buffer(name + "out", np.float32, tokens, self._model.config.hidden_size)
        return _Experts(first, inner, *packed, buffers, out)

    def _plan(self, count: int) -> _Plan:
        c, limits, buffer = self._model.config, self._limits, self._buffer
        half, layer = c.head_dim // 2, self._layers[0]
        widths = [weight[0].shape[1] * PANEL for weight in layer.weights[:2]]
        groups = max(weight[0].shape[2] for weight in layer.weights[:2])
        x, hidden, nothing, final = (
            buffer(name, np.float32, count, c.hidden_size) for name in ("x", "hidden", "nothing", "final")
        )
        angles, cos, sin = (buffer(name, np.float32, count, half) for name in ("angles", "cos", "sin"))
        taps = [layer for layer in limits.taps if layer < c.num_layers]
        tapped = buffer("taps", np.float32, len(taps), count, c.hidden_size)
        experts = buffer("experts", np.int64, count, self._experts.top_k)
        weights = buffer("weights", np.float32, count, self._experts.top_k)
        rows = (
            x,
            buffer("y", np.float32, count, widths[1]),
            buffer("qkv", np.float32, count, widths[0]),
            buffer("queries", np.int32, c.num_kv_heads, count, c.num_heads // c.num_kv_heads, half),
            buffer("attended", np.float32, count, c.num_heads * c.head_dim),
            buffer("words", np.int32, count * groups),
            buffer("scale", np.float32, count),
            cos,
            sin,
            tapped,
            hidden,
            experts,
            weights,
            buffer("gates", np.float32, count, 1),
        )
        number = count // limits.width
        begins = range(0, limits.width, QUERY_TOKENS)
        tiles = [
            (i, i * limits.width + begin, 0, min(QUERY_TOKENS, limits.width - begin))
            for i in range(number)
            for begin in begins
        ]
        return _Plan(
            rows,
            (
                self._cache,
                buffer("blocks", np.int64, count),
                buffer("offsets", np.int64, count),
                buffer("tables", np.int64, number, limits.max_blocks),
                np.array(tiles, dtype=np.int64),
            ),
            nothing,
            np.repeat(np.arange(number), limits.width),
            torch.from_numpy(x),
            torch.from_numpy(angles),
            torch.from_numpy(cos),
            torch.from_numpy(sin),
            (hidden, experts, weights),
            # What leaves the last layer is what the final norm has added up.
            (*torch.from_numpy(tapped), *([torch.from_numpy(x)] if len(taps) < len(limits.taps) else [])),
            torch.from_numpy(final),
        )

    def _buffer(self, name: str, dtype: Any, *shape: int) -> Array:
        """The beginning of a buffer, which is as long as its first use asks for."""
        size = int(np.prod(shape))
        if name not in self._pool:
            self._pool[name] = np.zeros(size, dtype=dtype)
        return self._pool[name][:size].reshape(shape)
