# SPDX-License-Identifier: Apache-2.0
"""A decoder's layers as one compiled call, phase after phase, shared by the threads of a team."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.models import kernels, paged
from paceline.models.codegen import PANEL, kernel
from paceline.models.kernels import Array, encode_rows, normalise
from paceline.models.products import CHUNK, multiply, multiply_gated

PHASES = 10
"""Of a layer; the final norm is one more."""


@kernel()
def _open(counts: Array, phase: int, kind: int, eps: float, layer: int, weights: Any, rows: Any, row: Array) -> None:
    """Up to the product that yields queries, keys and values: two phases."""
    attn_norms, _, _, _, qkv_weight, _, _, _ = weights
    x, y, qkv, _, _, _, words, scale, _, _, taps, tap_of = rows
    groups = qkv_weight[0].shape[2]
    normalise(counts, phase, kind, x, y, attn_norms, layer, eps, row, words, groups, scale, taps, tap_of[layer])
    multiply(counts, phase + 1, kind, x.shape[0], words, qkv_weight, layer, scale, qkv)


@kernel()
def _close(
    counts: Array, phase: int, kind: int, eps: float, layer: int, weights: Any, rows: Any, row: Array, pair: Array
) -> None:
    """What follows attention: six phases."""
    _, mlp_norms, _, _, _, o, gate_up, down = weights
    x, y, _, _, attended, act, words, scale, _, _, taps, _ = rows
    count = x.shape[0]
    encode_rows(counts, phase, kind, attended, row, words, o[0].shape[2], scale)
    multiply(counts, phase + 1, kind, count, words, o, layer, scale, y)
    groups = gate_up[0].shape[2]
    normalise(counts, phase + 2, kind, x, y, mlp_norms, layer, eps, row, words, groups, scale, taps, -1)
    multiply_gated(counts, phase + 3, kind, count, words, gate_up, layer, scale, pair, act)
    encode_rows(counts, phase + 4, kind, act, row, words, down[0].shape[2], scale)
    multiply(counts, phase + 5, kind, count, words, down, layer, scale, y)


@kernel()
def _scratch(rows: Any) -> Any:
    """What every thread needs for itself: a row, and the gate's and up's panels."""
    x, _, _, _, attended, act = rows[:6]
    size = max(x.shape[1], attended.shape[1], act.shape[1])
    return np.empty(size, np.float32), np.empty((CHUNK, 2 * PANEL), np.float32)


@kernel()
def open_layer(counts: Array, kind: int, eps: float, heads: int, layer: int, weights: Any, rows: Any) -> None:
    """Up to rotated queries and keys, for an attention that is not compiled: three phases."""
    row, _ = _scratch(rows)
    _open(counts, 0, kind, eps, layer, weights, rows, row)
    bias, norms, qkv, queries, cos, sin = weights[2], weights[3], rows[2], rows[3], rows[8], rows[9]
    kernels.rotate(counts, 2, qkv, bias, norms, layer, eps, cos, sin, heads, queries.shape[0])


@kernel()
def close_layer(counts: Array, kind: int, eps: float, layer: int, weights: Any, rows: Any) -> None:
    """What follows such an attention: six phases."""
    row, pair = _scratch(rows)
    _close(counts, 0, kind, eps, layer, weights, rows, row, pair)


@kernel()
def run_layers(counts: Array, kind: int, eps: float, heads: int, weights: Any, rows: Any, at: Any) -> None:
    """All layers, with attention over a paged cache: PHASES for each.

    Args:
        counts: the counters of as many phases.
        kind: how words are read, see `codegen`.
        eps: of the norms.
        heads: of the queries.
        weights: attn_norms and mlp_norms [layers, hidden]; bias and norms as `kernels.rotate_row` takes them; the
            weights of queries, keys and values; of attention's output; of gate and up; of down: as
            `products.multiply` and `products.multiply_gated` take them.
        rows: by token, float32 unless said otherwise: x, the residual stream; y, what is to be added to it first; a
            product's queries, keys and values; queries (int32, as `paged.attend` takes them); attention's output; the
            gated activation; encoded rows (int32, flat); their scales; cosines; sines; taps [taps, tokens, hidden],
            where x is copied before some layers; and which tap a layer has, -1 for none (int64, [layers + 1]).
        at: `paged.PagedRows.arrays`.
    """
    row, pair = _scratch(rows)
    bias, norms = weights[2], weights[3]
    _, _, qkv, queries, attended, _, _, _, cos, sin, _, _ = rows
    halves = queries.view(np.uint16)
    for layer in range(weights[0].shape[0]):
        phase = layer * PHASES
        _open(counts, phase, kind, eps, layer, weights, rows, row)
        paged.place(counts, phase + 2, qkv, bias, norms, layer, eps, cos, sin, at, heads, halves)
        paged.attend(counts, phase + 3, at, layer, heads, queries, attended)
        _close(counts, phase + 4, kind, eps, layer, weights, rows, row, pair)


@kernel()
def project(counts: Array, kind: int, x: Array, words: Array, weight: Any, scale: Array, out: Array) -> None:
    """A single product of ``x`` [rows, size]: two phases. ``out`` [rows, width], width a multiple of PANEL."""
    row = np.empty(x.shape[1], np.float32)
    encode_rows(counts, 0, kind, x, row, words, weight[0].shape[2], scale)
    multiply(counts, 1, kind, x.shape[0], words, weight, 0, scale, out)
