# SPDX-License-Identifier: Apache-2.0
"""Compiled phases of a decoder step: products of encoded rows with packed weights. See `kernels` for both words."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from paceline.models.codegen import PANEL, TILE_ROWS, kernel, tile
from paceline.models.kernels import FLAGS, Array, exponential
from paceline.models.team import each_unit

CHUNK = 192
"""Rows of a product that are taken at once, so that they stay in the second-level cache."""


@kernel()
def product(
    kind: int,
    begin: int,
    end: int,
    words: Array,
    words_at: int,
    words_stride: int,
    weight: Array,
    weight_at: int,
    groups: int,
    start: Array,
    weight_scale: Array,
    column: int,
    scale: Array,
    out: Array,
    out_at: int,
    out_stride: int,
) -> None:
    """One panel of a product for rows [begin, end): `codegen.tile` after tile, of about equal height.

    ``column``: where the panel's entries of ``start`` and ``weight_scale`` begin; ``words_at`` and ``out_at`` belong to
    row 0.
    """
    t = begin
    tiles = (end - begin + TILE_ROWS - 1) // TILE_ROWS
    while t < end:
        n = (end - t + tiles - 1) // tiles
        tiles -= 1
        tile(
            kind,
            n,
            words,
            words_at + t * words_stride,
            words_stride,
            weight,
            weight_at,
            groups,
            start,
            column,
            weight_scale,
            scale,
            t,
            out,
            out_at + t * out_stride,
            out_stride,
        )
        t += n


@njit(inline="always")
def multiply_panel(
    kind: Any, begin: Any, end: Any, words: Any, weight: Any, panel: Any, scale: Any, out: Any, out_at: Any, stride: Any
) -> None:
    """`product` for one panel of a packed ``weight``; ``panel`` counts through its layers. ``stride``: of ``out``."""
    packed, start, weight_scale = weight
    groups = packed.shape[2]
    product(
        kind,
        begin,
        end,
        words,
        0,
        groups,
        packed,
        panel * groups * PANEL,
        groups,
        start,
        weight_scale,
        panel * PANEL,
        scale,
        out,
        out_at,
        stride,
    )


@njit(inline="always")
def _multiply_unit(unit: Any, args: Any) -> None:
    kind, rows, words, weight, layer, scale, out, columns, each = args
    panels = weight[0].shape[1]
    begin = unit // columns * CHUNK
    first = unit % columns * each
    for panel in range(first, min(panels, first + each)):
        at = layer * panels + panel
        end = min(rows, begin + CHUNK)
        multiply_panel(kind, begin, end, words, weight, at, scale, out, panel * PANEL, out.shape[1])


@kernel()
def multiply(
    counts: Array, phase: int, kind: int, rows: int, words: Array, weight: Any, layer: int, scale: Array, out: Array
) -> None:
    """out = encoded rows times a weight. ``out`` [rows, width], width a multiple of PANEL, beyond the weight's too.

    ``weight``: words [layers, panels, groups, PANEL], start and scale [layers * panels * PANEL].
    """
    panels = weight[0].shape[1]
    each = 1 if panels < 256 else 8
    columns = (panels + each - 1) // each
    units = columns * ((rows + CHUNK - 1) // CHUNK)
    each_unit(counts, phase, units, _multiply_unit, (kind, rows, words, weight, layer, scale, out, columns, each))


@njit(inline="always", fastmath=FLAGS, error_model="numpy")
def gated(g: Any, up: Any) -> Any:
    """silu(g) * up, in float32."""
    return g / (np.float32(1.0) + exponential(-g)) * up


@njit(inline="always", fastmath=FLAGS)
def _multiply_gated_unit(unit: Any, args: Any) -> None:
    kind, rows, words, weight, layer, scale, pair, out = args
    panels = weight[0].shape[1]
    columns = panels // 2
    begin = unit // columns * CHUNK
    end = min(rows, begin + CHUNK)
    column = unit % columns
    for half in range(2):
        at = layer * panels + 2 * column + half
        pair_at = half * PANEL - begin * 2 * PANEL
        multiply_panel(kind, begin, end, words, weight, at, scale, pair, pair_at, 2 * PANEL)
    for t in range(begin, end):
        for j in range(PANEL):
            out[t, column * PANEL + j] = gated(pair[t - begin, j], pair[t - begin, PANEL + j])


@kernel(fastmath=FLAGS)
def multiply_gated(
    counts: Array,
    phase: int,
    kind: int,
    rows: int,
    words: Array,
    weight: Any,
    layer: int,
    scale: Array,
    pair: Array,
    out: Array,
) -> None:
    """out = silu(gate) * up, [rows, width]; the weight's panels are gate, up, gate, up, ...

    ``pair``: scratch [CHUNK, 2 * PANEL].
    """
    units = weight[0].shape[1] // 2 * ((rows + CHUNK - 1) // CHUNK)
    each_unit(counts, phase, units, _multiply_gated_unit, (kind, rows, words, weight, layer, scale, pair, out))
