# SPDX-License-Identifier: Apache-2.0
"""Compiled phases of a decode step of a mixture in int8: a layer up to its router, and a rank's experts.

Between the two lies the exchange with other ranks. Rows are independent of each other, bit for bit, as in `kernels`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from paceline.models import paged
from paceline.models.codegen import INT8, PANEL, kernel
from paceline.models.kernels import FLAGS, Array, add_and_norm, encode, encode_rows, exponential, keep
from paceline.models.products import gated, multiply, multiply_panel
from paceline.models.team import each_row, each_unit, leave, settle, share, take

OPEN_PHASES, EXPERT_PHASES = 8, 6

_PANELS = 4
"""Panels of a product in a unit: few enough that a team shares even a small expert."""


@njit(inline="always", fastmath=FLAGS, error_model="numpy")
def _route_row(hidden: Any, t: Any, router: Any, shares: Any, normed: Any, experts: Any, weights: Any) -> None:
    """Choose the experts of row ``t``: see `open_layer`. Of equal shares the first counts, and NaN ends no search."""
    count, top_k = router.shape[0], experts.shape[1]
    largest = np.float32(-np.inf)
    for e in range(count):
        dot = np.float32(0.0)
        for j in range(router.shape[1]):
            dot += hidden[t, j] * router[e, j]
        shares[e] = dot
        largest = max(largest, dot)
    total = np.float32(0.0)
    for e in range(count):
        shares[e] = exponential(shares[e] - largest)
        total += shares[e]
    chosen = np.float32(0.0)
    for k in range(top_k):
        best = -1
        for e in range(count):
            taken = False
            for i in range(k):
                taken = taken or experts[t, i] == e
            if not taken and (best < 0 or shares[e] > shares[best]):
                best = e
        experts[t, k] = best
        weights[t, k] = shares[best] / total
        chosen += weights[t, k]
    if normed:
        for k in range(top_k):
            weights[t, k] /= chosen


@kernel(fastmath=FLAGS)
def normalise_and_route(
    counts: Array,
    phase: int,
    x: Array,
    y: Array,
    norms: Array,
    layer: int,
    eps: float,
    taps: Array,
    tap: int,
    hidden: Array,
    router: Array,
    gate: Array,
    normed: bool,
    experts: Array,
    weights: Array,
    gates: Array,
) -> None:
    """x += y, to be kept in ``taps`` if ``tap`` is not negative; ``hidden`` = its RMS norm; what router and gate say.

    ``router`` and ``gate`` (see `open_layer`) may have no rows; ``experts`` and ``weights``, or ``gates``, then stay as
    they are.
    """
    rows, size = x.shape
    each = share(rows)
    units = (rows + each - 1) // each
    shares = np.empty(router.shape[0], np.float32)
    unit = take(counts, phase)
    while unit < units:
        for t in range(unit * each, min(rows, unit * each + each)):
            add_and_norm(x, y, t, norms[layer], eps, hidden[t])
            keep(x, t, taps, tap)
            if router.shape[0]:
                _route_row(hidden, t, router, shares, normed, experts, weights)
            if gate.shape[0]:
                dot = np.float32(0.0)
                for j in range(size):
                    dot += hidden[t, j] * gate[0, j]
                gates[t, 0] = np.float32(1.0) / (np.float32(1.0) + exponential(-dot))
        leave(counts, phase)
        unit = take(counts, phase)
    settle(counts, phase, units)


@kernel()
def open_layer(
    counts: Array,
    eps: float,
    heads: int,
    layer: int,
    tap: int,
    added: Array,
    norms: Any,
    weights: Any,
    normed: bool,
    rows: Any,
    at: Any,
) -> None:
    """A layer from what the one before adds to the residual stream to its own router: OPEN_PHASES.

    Args:
        counts: the counters of as many phases.
        eps: of the norms.
        heads: of the queries.
        layer: its index, in ``norms`` and in the cache.
        tap: where in the taps the residual stream is copied to before the layer, negative for nowhere.
        added: what is added to the residual stream first, float32 [tokens, hidden] at least.
        norms: of attention and of the mixture [layers, hidden]; bias and norms as `kernels.rotate_row` takes them.
        weights: of queries, keys and values; of attention's output: this layer's alone, as `products.multiply` takes
            them; the router's [experts, hidden] and that of a shared expert's gate [1, hidden], float32, without rows
            if the layer has none.
        normed: the weights of the chosen experts are scaled to the sum 1.
        rows: by token, float32 unless said otherwise: x, the residual stream; attention's part of it; a product's
            queries, keys and values; queries (int32, as `paged.attend` takes them); attention's output; encoded rows
            (int32, flat); their scales; cosines; sines; taps [taps, tokens, hidden]; and what comes out: the normed
            stream; the chosen experts (int64, [tokens, top_k]); their weights; a shared expert's weight [tokens, 1].
        at: `paged.PagedRows.arrays`.
    """
    attn_norms, mlp_norms, bias, head_norms = norms
    qkv_weight, o, router, gate = weights
    x, y, qkv, queries, attended, words, scale, cos, sin, taps, hidden, experts, shares, gates = rows
    row = np.empty(max(x.shape[1], attended.shape[1]), np.float32)
    groups = qkv_weight[0].shape[2]
    out = hidden, router[:0], gate[:0], normed, experts, shares, gates
    normalise_and_route(counts, 0, x, added, attn_norms, layer, eps, taps, tap, *out)
    encode_rows(counts, 1, INT8, hidden, row, words, groups, scale)
    multiply(counts, 2, INT8, x.shape[0], words, qkv_weight, 0, scale, qkv)
    halves = queries.view(np.uint16)
    paged.place(counts, 3, qkv, bias, head_norms, layer, eps, cos, sin, at, heads, halves)
    paged.attend(counts, 4, at, layer, heads, queries, attended)
    encode_rows(counts, 5, INT8, attended, row, words, o[0].shape[2], scale)
    multiply(counts, 6, INT8, x.shape[0], words, o, 0, scale, y)
    out = hidden, router, gate, normed, experts, shares, gates
    normalise_and_route(counts, 7, x, y, mlp_norms, layer, eps, taps, -1, *out)


@njit(inline="always")
def _sort_all(unit: Any, args: Any) -> None:
    first, experts, bounds, places = args
    rows, top_k = experts.shape
    own = bounds.shape[0] - 1
    places[:rows] = -1
    place = 0
    for e in range(own):
        bounds[e] = place
        for t in range(rows):
            for k in range(top_k):
                if experts[t, k] == first + e:
                    i = 0
                    while places[t, i] >= 0:
                        i += 1
                    places[t, i] = place
                    place += 1
    bounds[own] = place


@kernel()
def _sort(counts: Array, phase: int, first: int, experts: Array, bounds: Array, places: Array) -> None:
    """Give each choice of an own expert its place among the rows that are computed, one expert after the other.

    ``bounds`` [own + 1]: where each expert's rows begin. ``places`` [tokens, top_k]: those of a token's choices, by
    expert, then -1.
    """
    each_unit(counts, phase, 1, _sort_all, (first, experts, bounds, places))


@kernel(inline="always")
def _encode_chosen_row(t: Any, args: Any) -> None:
    hidden, row, places, words, groups, scale = args
    size = hidden.shape[1]
    at = places[t, 0]
    if at >= 0:
        for j in range(size):
            row[j] = hidden[t, j]
        scale[at] = encode(INT8, row, size, words, at * groups, groups)
    for k in range(1, places.shape[1]):
        copy = places[t, k]
        if copy >= 0:
            scale[copy] = scale[at]
            words[copy * groups : (copy + 1) * groups] = words[at * groups : (at + 1) * groups]


@kernel()
def _encode_chosen(
    counts: Array, phase: int, hidden: Array, row: Array, places: Array, words: Array, groups: int, scale: Array
) -> None:
    """Encode each token once, and put it at each of its ``places``."""
    args = hidden, row, places, words, groups, scale
    each_row(counts, phase, hidden.shape[0], _encode_chosen_row, args)


@njit(inline="always")
def _multiply_some(unit: Any, args: Any) -> None:
    bounds, words, weight, scale, out, columns = args
    panels = weight[0].shape[1]
    expert, first = unit // columns, unit % columns * _PANELS
    begin, end = bounds[expert], bounds[expert + 1]
    if begin < end:
        for panel in range(first, min(panels, first + _PANELS)):
            at = expert * panels + panel
            multiply_panel(INT8, begin, end, words, weight, at, scale, out, panel * PANEL, out.shape[1])


@kernel()
def _multiply_each(
    counts: Array, phase: int, bounds: Array, words: Array, weight: Any, scale: Array, out: Array
) -> None:
    """Each expert's rows times its weight; ``weight`` as `products.multiply` takes it, an expert for a layer."""
    columns = (weight[0].shape[1] + _PANELS - 1) // _PANELS
    units = columns * weight[0].shape[0]
    each_unit(counts, phase, units, _multiply_some, (bounds, words, weight, scale, out, columns))


@njit(inline="always", fastmath=FLAGS, error_model="numpy")
def gate_row(both: Any, t: Any, inner: Any, out: Any) -> None:
    """silu(gate) * up of row ``t``, which stand side by side."""
    for j in range(inner):
        out[j] = gated(both[t, j], both[t, inner + j])


@kernel(inline="always", fastmath=FLAGS)
def _gate_each(t: Any, args: Any) -> None:
    both, inner, out = args
    gate_row(both, t, inner, out[t])


@kernel(fastmath=FLAGS)
def gate_rows(counts: Array, phase: int, both: Array, inner: int, out: Array) -> None:
    """silu(gate) * up, [rows, inner]."""
    each_row(counts, phase, both.shape[0], _gate_each, (both, inner, out))


@kernel(inline="always", fastmath=FLAGS)
def _encode_gated_row(t: Any, args: Any) -> None:
    inner, both, bounds, row, words, groups, scale = args
    if t < bounds[bounds.shape[0] - 1]:
        gate_row(both, t, inner, row)
        scale[t] = encode(INT8, row, inner, words, t * groups, groups)


@kernel(fastmath=FLAGS)
def _encode_gated(
    counts: Array,
    phase: int,
    most: int,
    inner: int,
    both: Array,
    bounds: Array,
    row: Array,
    words: Array,
    groups: int,
    scale: Array,
) -> None:
    """Encode `gate_row` of the rows that there are.

    Units are counted for ``most`` rows: a helper of the team may come so late that ``bounds`` belongs to another job.
    """
    each_row(counts, phase, most, _encode_gated_row, (inner, both, bounds, row, words, groups, scale))


@kernel(inline="always")
def _weighted_sum(t: Any, args: Any) -> None:
    first, experts, weights, bounds, places, y, out = args
    out[t] = np.float32(0.0)
    for i in range(places.shape[1]):
        place = places[t, i]
        if place >= 0:
            e = 0
            while bounds[e + 1] <= place:
                e += 1
            weight = np.float32(0.0)
            for k in range(experts.shape[1]):
                if experts[t, k] == first + e:
                    weight = weights[t, k]
            for j in range(out.shape[1]):
                out[t, j] += weight * y[place, j]


@kernel()
def _weighted_sums(
    counts: Array,
    phase: int,
    first: int,
    experts: Array,
    weights: Array,
    bounds: Array,
    places: Array,
    y: Array,
    out: Array,
) -> None:
    """A token's choices, weighted and added up in the order of experts."""
    each_row(counts, phase, out.shape[0], _weighted_sum, (first, experts, weights, bounds, places, y, out))


@kernel()
def run_experts(
    counts: Array,
    first: int,
    inner: int,
    hidden: Array,
    experts: Array,
    weights: Array,
    gate_up: Any,
    down: Any,
    buffers: Any,
    out: Array,
) -> None:
    """Weighted sums of the own experts, [tokens, hidden] float32: EXPERT_PHASES.

    Args:
        counts: the counters of as many phases.
        first: the number of the first own expert; choices of others are passed over.
        inner: an expert's inner width.
        hidden: normed states [tokens, hidden] float32.
        experts: the tokens' choices, no expert twice, int64 [tokens, top_k].
        weights: theirs, float32 [tokens, top_k].
        gate_up: of all own experts, as `products.multiply` takes the layers'; the gate's rows above those of up.
        down: likewise.
        buffers: with room for all tokens' choices: int64 where each own expert's rows begin [own + 1], and the choices'
            places [tokens, top_k]; encoded rows (int32, flat) and their scales; the products of gate and up; and of
            down.
        out: the result.
    """
    bounds, places, words, scale, both, y = buffers
    row = np.empty(max(inner, hidden.shape[1]), np.float32)
    tokens = hidden.shape[0]
    _sort(counts, 0, first, experts, bounds, places)
    _encode_chosen(counts, 1, hidden, row, places[:tokens], words, gate_up[0].shape[2], scale)
    _multiply_each(counts, 2, bounds, words, gate_up, scale, both)
    _encode_gated(counts, 3, tokens * experts.shape[1], inner, both, bounds, row, words, down[0].shape[2], scale)
    _multiply_each(counts, 4, bounds, words, down, scale, y)
    _weighted_sums(counts, 5, first, experts, weights, bounds, places[:tokens], y, out)
