# SPDX-License-Identifier: Apache-2.0
"""Attention of few tokens a row over the paged cache in bfloat16, read where it lies: nothing is gathered.

What a query yields depends on its own context alone, bit for bit: not on the rows beside it, nor on how many
tokens its row brings.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from paceline.models.kernels import FLAGS, Array, as_bits, as_float, exponential


@njit(inline="always")
def _to_bfloat16(value: Any) -> Any:
    """The upper half of a float32, rounded to nearest even; NaN stays NaN."""
    bits = as_bits(value)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(rounded) if value == value else np.uint16(0x7FC0)


@njit(inline="always")
def _from_bfloat16(half: Any) -> Any:
    return as_float(np.uint32(half) << np.uint32(16))


@njit(inline="always", fastmath=FLAGS, error_model="numpy")
def _softmax(row: Any) -> None:
    largest = row[0]
    for j in range(row.shape[0]):
        largest = row[j] if row[j] > largest else largest
    total = np.float32(0.0)
    for j in range(row.shape[0]):
        e = exponential(row[j] - largest)
        row[j] = e
        total += e
    inverse = np.float32(1.0) / total
    for j in range(row.shape[0]):
        row[j] *= inverse


@njit(cache=True, nogil=True)
def store(cache: Array, part: int, blocks: Array, offsets: Array, values: Array, stride: int) -> None:
    """Write the keys (``part`` 0) or values (1) of all tokens into one layer's cache.

    ``cache`` [blocks, 2, kv_heads, block_size, head_dim] holds bfloat16 as uint16. ``values`` is flat, float32:
    token t has its kv_heads * head_dim numbers from ``t * stride`` on.
    """
    kv_heads, size = cache.shape[2], cache.shape[4]
    for t in range(blocks.shape[0]):
        for h in range(kv_heads):
            target = cache[blocks[t], part, h, offsets[t]]
            source = values[t * stride + h * size : t * stride + (h + 1) * size]
            for d in range(size):
                target[d] = _to_bfloat16(source[d])


@njit(inline="always", fastmath=FLAGS, error_model="numpy")
def _attend_head(
    cache: Any,
    table: Any,
    h: Any,
    start: Any,
    width: Any,
    queries: Any,
    at: Any,
    stride: Any,
    fold: Any,
    scores: Any,
    scratch: Any,
    out: Any,
    first: Any,
    size: Any,
) -> None:
    """The queries of one row that share KV head ``h``; ``at`` is where its first token's queries begin."""
    block_size = cache.shape[3]
    factor = np.float32(1.0) / np.sqrt(np.float32(size))
    for position in range(start + width):
        key = cache[table[position // block_size], 0, h, position % block_size]
        for d in range(size):
            scratch[d] = _from_bfloat16(key[d])
        for i in range(max(0, position - start), width):
            for f in range(fold):
                begin = at + i * stride + (h * fold + f) * size
                query = queries[begin : begin + size]
                total = np.float32(0.0)
                for d in range(size):
                    total += query[d] * scratch[d]
                scores[i * fold + f, position] = total * factor
    for i in range(width):
        for f in range(fold):
            _softmax(scores[i * fold + f, : start + i + 1])
            out[first + i, (h * fold + f) * size : (h * fold + f + 1) * size] = np.float32(0.0)
    for position in range(start + width):
        value = cache[table[position // block_size], 1, h, position % block_size]
        for d in range(size):
            scratch[d] = _from_bfloat16(value[d])
        for i in range(max(0, position - start), width):
            for f in range(fold):
                target = out[first + i, (h * fold + f) * size : (h * fold + f + 1) * size]
                weight = scores[i * fold + f, position]
                for d in range(size):
                    target[d] += weight * scratch[d]


@njit(cache=True, fastmath=FLAGS, error_model="numpy", nogil=True)
def attend(
    cache: Array,
    tables: Array,
    starts: Array,
    firsts: Array,
    widths: Array,
    queries: Array,
    stride: int,
    scores: Array,
    out: Array,
) -> None:
    """Causal attention of rows of few tokens.

    Args:
        cache: one layer, as for `store`; the step's own keys and values are in it.
        tables: [rows, blocks], int64.
        starts: position of each row's first token.
        firsts: index of each row's first token in ``queries`` and ``out``.
        widths: tokens of each row.
        queries: flat, float32: token t has its heads * head_dim numbers from ``t * stride`` on.
        scores: scratch, at least [max(widths) * heads / kv_heads, longest context].
        out: [tokens, heads * head_dim].
    """
    kv_heads, size = cache.shape[2], cache.shape[4]
    fold = out.shape[1] // size // kv_heads
    scratch = np.empty(size, dtype=np.float32)
    for r in range(starts.shape[0]):
        first, width, at = firsts[r], widths[r], firsts[r] * stride
        for h in range(kv_heads):
            # A size known to the compiler makes straight code of the inner loops.
            if size == 64:
                _attend_head(
                    cache, tables[r], h, starts[r], width, queries, at, stride, fold, scores, scratch, out, first, 64
                )
            else:
                _attend_head(
                    cache, tables[r], h, starts[r], width, queries, at, stride, fold, scores, scratch, out, first, size
                )
