# SPDX-License-Identifier: Apache-2.0
"""Compiled attention over a paged KV cache in bfloat16, read where it lies.

Queries and weights are rounded to bfloat16 before their products, which accumulate in float32. What a query yields
depends on its own context alone, bit for bit: not on the rows beside it, nor on how many tokens its row brings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from paceline.models.codegen import BFLOAT16, LANES, PANEL, interleave, kernel, transpose
from paceline.models.kernels import FLAGS, as_bits, as_float, exponential, rotate_row, to_bfloat16
from paceline.models.products import product
from paceline.models.team import Team, leave, settle, share, take

Array = np.ndarray

QUERY_TOKENS = 32
"""Tokens of a row that are attended together at most."""


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The rows of a step and where their keys and values lie; all arrays int64 unless said otherwise.

    ``cache`` [layers, blocks, 2, kv_heads, block_size, head_dim], keys before values, holds bfloat16 as uint16.
    ``blocks`` and ``offsets`` [tokens]: where each token's key and value go. ``tables`` [rows, blocks], padded.
    ``tiles`` [tiles, 4]: a row's index, its tile's first token in the batch, that token's position, the tile's tokens.
    """

    cache: Array
    blocks: Array
    offsets: Array
    tables: Array
    tiles: Array

    @staticmethod
    def of(cache: Array, rows: Sequence[tuple[int, int, Array]]) -> PagedRows:
        """``rows``: first position, number of tokens, and block table of each row; tokens come in their order."""
        block_size = cache.shape[4]
        counts = [n for _, n, _ in rows]
        used = [-(-(start + n) // block_size) for start, n, _ in rows]
        tables = np.zeros((len(rows), max(used)), dtype=np.int64)
        for i, (_, _, table) in enumerate(rows):
            tables[i, : used[i]] = table[: used[i]]
        if max(counts) == 1:
            positions = np.array([start for start, _, _ in rows], dtype=np.int64)
            of_token = np.arange(len(rows))
        else:
            positions = np.concatenate([np.arange(start, start + n) for start, n, _ in rows])
            of_token = np.repeat(np.arange(len(rows)), counts)
        blocks, offsets = tables[of_token, positions // block_size], positions % block_size
        tiles, first = [], 0
        for i, (start, n, _) in enumerate(rows):
            begins = range(0, n, QUERY_TOKENS)
            tiles += [(i, first + begin, start + begin, min(QUERY_TOKENS, n - begin)) for begin in begins]
            first += n
        return PagedRows(cache, blocks, offsets, tables, np.array(tiles, dtype=np.int64))

    @property
    def arrays(self) -> tuple[Array, ...]:
        """As compiled functions take it."""
        return self.cache, self.blocks, self.offsets, self.tables, self.tiles


@kernel(fastmath=FLAGS)
def place(
    counts: Array,
    phase: int,
    qkv: Array,
    bias: Array,
    norms: Array,
    layer: int,
    eps: float,
    cos: Array,
    sin: Array,
    paged: Any,
    heads: int,
    queries: Array,
) -> None:
    """Make queries, keys and values of a stacked product as `kernels.rotate_row` does, and put them where they go.

    Keys and values go to the cache; queries, in bfloat16, to ``queries`` [kv_heads, tokens, heads / kv_heads, head_dim]
    (uint16). With no columns in ``cos`` the queries are rotated already.
    """
    cache, blocks, offsets, _, _ = paged
    rows = qkv.shape[0]
    kv_heads, size = cache.shape[3], cache.shape[5]
    fold = heads // kv_heads
    each = share(rows)
    units = (rows + each - 1) // each
    unit = take(counts, phase)
    while unit < units:
        for t in range(unit * each, min(rows, unit * each + each)):
            if cos.shape[1]:
                rotate_row(qkv, t, bias, norms, layer, eps, cos, sin, heads, kv_heads)
            block, offset = blocks[t], offsets[t]
            for h in range(heads):
                for d in range(size):
                    queries[h // fold, t, h % fold, d] = to_bfloat16(qkv[t, h * size + d])
            for part in range(2):
                for h in range(kv_heads):
                    at = (heads + part * kv_heads + h) * size
                    for d in range(size):
                        cache[layer, block, part, h, offset, d] = to_bfloat16(qkv[t, at + d])
        leave(counts, phase)
        unit = take(counts, phase)
    settle(counts, phase, units)


@njit(inline="always")
def padded(n: Any) -> Any:
    """``n`` rounded up to whole panels."""
    return (n + PANEL - 1) // PANEL * PANEL


@kernel()
def _keys_panel(
    cache: Array, words: Array, layer: int, table: Any, head: int, first: int, end: int, out: Array
) -> None:
    """Keys [first, first + PANEL) of one KV head as a panel of `codegen.tile`: [head_dim / 2, PANEL] words, flat.

    Keys from ``end`` on are left as they are. ``words``: the cache, flat, in words.
    """
    blocks, kv_heads, block_size, half = cache.shape[1], cache.shape[3], cache.shape[4], cache.shape[5] // 2
    for begin in range(first, min(end, first + PANEL), LANES):
        column = begin - first
        if block_size % LANES == 0 and half % LANES == 0:
            block = table[begin // block_size]
            at = (((layer * blocks + block) * 2 * kv_heads + head) * block_size + begin % block_size) * half
            for d in range(0, half, LANES):
                transpose(words, at + d, half, out, d * PANEL + column, PANEL)
        else:
            for position in range(begin, min(end, begin + LANES)):
                block = table[position // block_size]
                at = (((layer * blocks + block) * 2 * kv_heads + head) * block_size + position % block_size) * half
                for d in range(half):
                    out[d * PANEL + position - first] = words[at + d]


@njit(inline="always")
def _pair_values(halves: Any, a: Any, b: Any, both: Any, size: Any, out: Any, at: Any, stride: Any) -> None:
    """The values at ``a`` and ``b`` (zeros instead of ``b`` unless ``both``), interleaved, panel by panel."""
    for begin in range(0, size, PANEL):
        if both and begin + PANEL <= size:
            interleave(halves, a + begin, b + begin, out, at)
        else:
            for d in range(min(PANEL, size - begin)):
                high = np.uint32(halves[b + begin + d]) << np.uint32(16) if both else np.uint32(0)
                out[at + d] = np.int32(np.uint32(halves[a + begin + d]) | high)
        at += stride


@kernel()
def _values_panels(
    cache: Array, halves: Array, layer: int, table: Any, head: int, keys: int, end: int, out: Array
) -> None:
    """Values of one KV head as panels of `codegen.tile`: [head_dim / PANEL, keys / 2, PANEL] words, flat.

    Those from ``end`` on are zero; ``keys`` is even. ``halves``: the cache, flat.
    """
    blocks, kv_heads, block_size, size = cache.shape[1], cache.shape[3], cache.shape[4], cache.shape[5]
    stride = 2 * kv_heads * block_size * size
    base = layer * blocks * stride + (kv_heads + head) * block_size * size
    panel = keys // 2 * PANEL
    if block_size % 2:
        for position in range(0, end, 2):
            a = base + table[position // block_size] * stride + position % block_size * size
            both = position + 1 < end
            b = base + table[(position + 1) // block_size] * stride + (position + 1) % block_size * size if both else a
            _pair_values(halves, a, b, both, size, out, position // 2 * PANEL, panel)
    else:
        for i in range((end + block_size - 1) // block_size):
            a = base + table[i] * stride
            for position in range(i * block_size, min(end, (i + 1) * block_size), 2):
                _pair_values(halves, a, a + size, position + 1 < end, size, out, position // 2 * PANEL, panel)
                a += 2 * size
    for pair in range((end + 1) // 2, keys // 2):
        for begin in range(0, size, PANEL):
            at = begin // PANEL * panel + pair * PANEL
            out[at : at + PANEL] = 0


@njit(inline="always")
def _ordered(bits: Any) -> Any:
    """A float32's bits (int32) as an integer that is ordered as floats are, and back; NaN stands at the ends."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@njit(inline="always", fastmath=FLAGS, error_model="numpy")
def _softmax(scores: Any, seen: Any, out: Any) -> None:
    """Softmax of ``scores[:seen]`` (overwritten) as bfloat16 in ``out``, with zeros in the rest of it."""
    # Vector registers hold the largest of integers without asking where NaN stands.
    highest = np.int32(-0x80000000)
    for j in range(seen):
        highest = max(highest, _ordered(np.int32(as_bits(scores[j]))))
    largest = as_float(np.uint32(_ordered(highest)))
    total = np.float32(0.0)
    for j in range(seen):
        e = exponential(scores[j] - largest)
        scores[j] = e
        total += e
    inverse = np.float32(1.0) / total
    for j in range(seen):
        out[j] = to_bfloat16(scores[j] * inverse)
    for j in range(seen, out.shape[0]):
        out[j] = np.uint16(0)


@njit(inline="always", fastmath=FLAGS, error_model="numpy")
def _weigh(scores: Any, width: Any, fold: Any, position: Any, keys: Any, out: Any) -> None:
    """`_softmax` for ``width`` tokens from ``position`` on, ``fold`` heads each, ``keys`` scores apart."""
    for i in range(width):
        for f in range(fold):
            at = (i * fold + f) * keys
            _softmax(scores[at : at + keys], position + i + 1, out[at : at + keys])


@njit(inline="always")
def _hand_out(result: Any, width: Any, fold: Any, size: Any, out: Any, first: Any, head: Any) -> None:
    """Copy what the heads of one KV head yielded to where it belongs in ``out``."""
    for i in range(width):
        for f in range(fold):
            for d in range(size):
                out[first + i, (head * fold + f) * size + d] = result[i * fold + f, d]


@kernel(fastmath=FLAGS)
def attend(counts: Array, phase: int, paged: Any, layer: int, heads: int, queries: Array, out: Array) -> None:
    """Causal attention of the step's rows, whose keys and values are in the cache already.

    ``queries`` as `place` leaves them, seen as words (int32): [kv_heads, tokens, heads / kv_heads, head_dim / 2].
    ``out`` [tokens, heads * head_dim].
    """
    cache, _, _, tables, tiles = paged
    kv_heads, size = cache.shape[3], cache.shape[5]
    fold, half, tokens = heads // kv_heads, size // 2, queries.shape[1]
    units = tiles.shape[0] * kv_heads
    # Not `team.each_unit`: who gets no unit must not size scratch memory by arrays that may be another step's by now.
    unit = take(counts, phase)
    if unit < units:
        rows, longest = 0, 0
        for i in range(tiles.shape[0]):
            rows = max(rows, tiles[i, 3] * fold)
            longest = max(longest, padded(tiles[i, 2] + tiles[i, 3]))
        wide = padded(size)
        flat = cache.reshape(-1)
        words = flat.view(np.int32)
        panel = np.zeros(half * PANEL, dtype=np.int32)
        values = np.zeros(wide * longest // 2, dtype=np.int32)
        scores = np.empty(rows * longest, dtype=np.float32)
        weights = np.empty(rows * longest // 2, dtype=np.int32)
        result = np.empty((rows, wide), dtype=np.float32)
        start = np.zeros(PANEL, dtype=np.float32)
        factor = np.full(PANEL, np.float32(1.0) / np.sqrt(np.float32(size)), dtype=np.float32)
        ones = np.ones(max(rows, PANEL), dtype=np.float32)
        halves = weights.view(np.uint16)
    while unit < units:
        # The longest contexts are begun first.
        tile, h = tiles.shape[0] - 1 - unit // kv_heads, unit % kv_heads
        row, first, position, width = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2], tiles[tile, 3]
        end = position + width
        keys = padded(end)
        for key in range(0, keys, PANEL):
            _keys_panel(cache, words, layer, tables[row], h, key, end, panel)
            product(
                BFLOAT16,
                max(0, key - position) * fold,
                width * fold,
                queries,
                (h * tokens + first) * fold * half,
                half,
                panel,
                0,
                half,
                start,
                factor,
                0,
                ones,
                scores,
                key,
                keys,
            )
        _weigh(scores, width, fold, position, keys, halves)
        _values_panels(cache, flat, layer, tables[row], h, keys, end, values)
        for d in range(0, wide, PANEL):
            product(
                BFLOAT16,
                0,
                width * fold,
                weights,
                0,
                keys // 2,
                values,
                d * keys // 2,
                keys // 2,
                start,
                ones,
                0,
                ones,
                result,
                d,
                wide,
            )
        _hand_out(result, width, fold, size, out, first, h)
        leave(counts, phase)
        unit = take(counts, phase)
    settle(counts, phase, units)


@kernel()
def place_and_attend(
    counts: Array,
    qkv: Array,
    bias: Array,
    norms: Array,
    layer: int,
    cos: Array,
    paged: Any,
    heads: int,
    queries: Array,
    out: Array,
) -> None:
    """Attention of queries, keys and values that stand side by side in ``qkv``, rotated already."""
    place(counts, 0, qkv, bias, norms, layer, 0.0, cos, cos, paged, heads, queries.view(np.uint16))
    attend(counts, 1, paged, layer, heads, queries, out)


def attend_alone(team: Team, rows: PagedRows, layer: int, heads: int, qkv: Array) -> Array:
    """Attention of one layer, outside of `fused`: ``qkv`` [tokens, (heads + 2 * kv_heads) * head_dim] float32."""
    kv_heads, size = rows.cache.shape[3], rows.cache.shape[5]
    tokens = len(qkv)
    queries = np.empty((kv_heads, tokens, heads // kv_heads, size // 2), dtype=np.int32)
    out = np.empty((tokens, heads * size), dtype=np.float32)
    none = np.empty((1, 0), dtype=np.float32)
    team.run(
        place_and_attend, 2, qkv, none, np.empty((1, 2, 0), np.float32), layer, none, rows.arrays, heads, queries, out
    )
    return out
