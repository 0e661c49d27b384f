# SPDX-License-Identifier: Apache-2.0
"""Compiled phases of a decoder step: what lies between its matrix products, fused.

Rows (tokens) are independent of each other: what a row becomes does not depend on its batch, bit for bit.

Rows are *encoded* before a product, as 32-bit words that `codegen.tile` reads. In bfloat16 a word holds two numbers.
In int8 it holds four: a row is mixed as `_mix` does, which spreads outliers over many entries, and divided by a scale
of its own, so that its largest magnitude becomes 127; 128 is added. A row that holds a number that is not finite
becomes zeros with scale NaN, so that NaN is what any product with it yields.

Each phase takes its units from `team`'s counters. Compiled code is kept in Numba's cache (beside the source, or in the
user's cache folder if that is not writable).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

from paceline.models.codegen import INT8, LANES, hadamard, kernel
from paceline.models.team import each_row, leave, settle, share, take

Array = np.ndarray

FLAGS = {"reassoc", "contract", "arcp", "nsz"}
"""What the compiler may do to floating-point code: enough to use vector registers; NaN and infinity keep meaning."""

MIXED = 64
"""Numbers that are mixed with each other at most; a power of two."""

_NOT_FINITE = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)


def _as_float(typing_context: Any, bits: Any) -> Any:
    """The float32 of a uint32's bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


def _as_bits(typing_context: Any, value: Any) -> Any:
    """The bits of a float32 as uint32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


# Inside compiled code the typing context is not passed.
as_float: Any = intrinsic(_as_float)
as_bits: Any = intrinsic(_as_bits)


@njit(inline="always")
def to_bfloat16(value: Any) -> Any:
    """The upper half of a float32 as uint16, rounded to nearest even; NaN stays NaN."""
    bits = as_bits(value)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(rounded) if value == value else np.uint16(0x7FC0)


@njit(inline="always", fastmath=FLAGS)
def exponential(x: Any) -> Any:
    """exp(x) in float32 to about two units in the last place; 2^n by the exponent's bits, the rest by its series."""
    x = min(max(x, np.float32(-80.0)), np.float32(88.0)) if x == x else x
    t = x * np.float32(1.4426950408889634)
    n = np.floor(t + np.float32(0.5))
    f = (t - n) * np.float32(0.6931471805599453)
    p = np.float32(1.0 / 720.0)
    p = p * f + np.float32(1.0 / 120.0)
    p = p * f + np.float32(1.0 / 24.0)
    p = p * f + np.float32(1.0 / 6.0)
    p = p * f + np.float32(0.5)
    p = p * f + np.float32(1.0)
    p = p * f + np.float32(1.0)
    whole = np.uint32((np.int32(n) + np.int32(127)) << np.int32(23))
    return p * as_float(whole)


@njit(inline="always", fastmath=FLAGS)
def _mix(row: Any, size: Any) -> None:
    """The Walsh-Hadamard transform, unnormalised and in place, of groups of MIXED numbers of ``row``.

    A group is a vector from each quarter of the row; where MIXED does not divide ``size``, it is as many neighbours as
    the largest power of two that does. As its matrix H is symmetric with H H = order, a product with weights that went
    through it as well is ``order`` times the original one (the idea of QuaRot, Ashkboos et al., 2024).
    """
    order = min(size & -size, MIXED)
    if order == MIXED:
        for begin in range(0, size // 4, LANES):
            hadamard(row, begin, size // 4)
        return
    half = 1
    while half < order:
        for begin in range(0, size, 2 * half):
            for j in range(begin, begin + half):
                a, b = row[j], row[j + half]
                row[j] = a + b
                row[j + half] = a - b
        half *= 2


@kernel(fastmath=FLAGS)
def encode(kind: int, row: Array, size: int, words: Array, at: int, groups: int) -> np.float32:
    """Encode ``row[:size]`` (which is overwritten) in ``words`` (int32, flat) from ``at`` on; the row's scale."""
    if kind != INT8:
        halves = words[at : at + groups].view(np.uint16)
        for j in range(size):
            halves[j] = to_bfloat16(row[j])
        for j in range(size, 2 * groups):
            halves[j] = np.uint16(0)
        return np.float32(1.0)
    _mix(row, size)
    # The magnitudes of floats are ordered as their bits are, and NaN stands above infinity.
    largest = np.uint32(0)
    for j in range(size):
        largest = max(largest, as_bits(row[j]) & _MAGNITUDE)
    scale, inverse = as_float(largest) / np.float32(127.0), np.float32(0.0)
    if largest >= _NOT_FINITE:
        scale = np.float32(np.nan)
        row[:size] = np.float32(0.0)
    elif largest < np.uint32(0x00800000):
        scale = np.float32(0.0)
    else:
        inverse = np.float32(1.0) / scale
    quarters = words[at : at + groups].view(np.uint8)
    for j in range(size):
        quarters[j] = np.uint8(np.int32(np.rint(row[j] * inverse)) + np.int32(128))
    for j in range(size, 4 * groups):
        quarters[j] = np.uint8(0)
    return scale


@njit(inline="always", fastmath=FLAGS, error_model="numpy")
def add_and_norm(x: Any, y: Any, t: Any, weight: Any, eps: Any, out: Any) -> None:
    """x += y in row ``t``, then ``out[:]`` = its RMS norm (Zhang and Sennrich, 2019) times ``weight``.

    In which order the compiler adds up depends on what surrounds this. In loops of their own all phases come to the
    same bits; in `team.each_row` they do not.
    """
    size = x.shape[1]
    total = np.float32(0.0)
    for j in range(size):
        v = x[t, j] + y[t, j]
        x[t, j] = v
        total += v * v
    r = np.float32(1.0) / np.sqrt(total / np.float32(size) + np.float32(eps))
    for j in range(size):
        out[j] = x[t, j] * r * weight[j]


@njit(inline="always")
def keep(x: Any, t: Any, taps: Any, tap: Any) -> None:
    """Copy row ``t`` to ``taps`` [taps, rows, hidden] if ``tap`` is not negative."""
    if tap >= 0:
        for j in range(x.shape[1]):
            taps[tap, t, j] = x[t, j]


@kernel(fastmath=FLAGS)
def normalise(
    counts: Array,
    phase: int,
    kind: int,
    x: Array,
    y: Array,
    weights: Array,
    layer: int,
    eps: float,
    row: Array,
    words: Array,
    groups: int,
    scale: Array,
    taps: Array,
    tap: int,
) -> None:
    """x += y, then the RMS norm of x, encoded.

    ``x``, ``y`` [rows, hidden], ``weights`` [layers, hidden], ``row`` scratch, ``words`` [rows * groups] int32,
    ``scale`` [rows]. ``tap``: where in ``taps`` [taps, rows, hidden] x is copied to, if not negative.
    """
    rows, size = x.shape
    each = share(rows)
    units = (rows + each - 1) // each
    unit = take(counts, phase)
    while unit < units:
        for t in range(unit * each, min(rows, unit * each + each)):
            add_and_norm(x, y, t, weights[layer], eps, row)
            keep(x, t, taps, tap)
            scale[t] = encode(kind, row, size, words, t * groups, groups)
        leave(counts, phase)
        unit = take(counts, phase)
    settle(counts, phase, units)


@kernel(inline="always")
def _encode_row(t: Any, args: Any) -> None:
    kind, x, row, words, groups, scale = args
    size = x.shape[1]
    for j in range(size):
        row[j] = x[t, j]
    scale[t] = encode(kind, row, size, words, t * groups, groups)


@kernel()
def encode_rows(
    counts: Array, phase: int, kind: int, x: Array, row: Array, words: Array, groups: int, scale: Array
) -> None:
    """Encode the rows of ``x`` [rows, size]."""
    each_row(counts, phase, x.shape[0], _encode_row, (kind, x, row, words, groups, scale))


@njit(inline="always", fastmath=FLAGS, error_model="numpy")
def _rotate_head(qkv: Any, t: Any, at: Any, norms: Any, layer: Any, part: Any, eps: Any, cos: Any, sin: Any) -> None:
    """Norm and rotate one head of queries (``part`` 0) or keys (1), in place."""
    half = cos.shape[1]
    if norms.shape[2]:
        total = np.float32(0.0)
        for j in range(2 * half):
            total += qkv[t, at + j] * qkv[t, at + j]
        r = np.float32(1.0) / np.sqrt(total / np.float32(2 * half) + np.float32(eps))
        for j in range(2 * half):
            qkv[t, at + j] = qkv[t, at + j] * r * norms[layer, part, j]
    for j in range(half):
        a, b = qkv[t, at + j], qkv[t, at + half + j]
        qkv[t, at + j] = a * cos[t, j] - b * sin[t, j]
        qkv[t, at + half + j] = b * cos[t, j] + a * sin[t, j]


@njit(inline="always", fastmath=FLAGS, error_model="numpy")
def rotate_row(
    qkv: Any,
    t: Any,
    bias: Any,
    norms: Any,
    layer: Any,
    eps: Any,
    cos: Any,
    sin: Any,
    heads: Any,
    kv_heads: Any,
) -> None:
    """Make queries, keys and values of row ``t`` of a stacked product ``qkv`` [rows, width], in place.

    ``bias`` [layers, width] is added if it has entries; if ``norms`` [layers, 2, head_dim] has entries, queries and
    keys are RMS-normalised head by head with them; then they are rotated in half-split order by ``cos`` and ``sin``
    [rows, head_dim / 2].
    """
    for j in range(bias.shape[1]):
        qkv[t, j] += bias[layer, j]
    for h in range(heads + kv_heads):
        _rotate_head(qkv, t, h * 2 * cos.shape[1], norms, layer, 0 if h < heads else 1, eps, cos, sin)


@kernel(fastmath=FLAGS)
def rotate(
    counts: Array,
    phase: int,
    qkv: Array,
    bias: Array,
    norms: Array,
    layer: int,
    eps: float,
    cos: Array,
    sin: Array,
    heads: int,
    kv_heads: int,
) -> None:
    """`rotate_row` for all rows."""
    rows = qkv.shape[0]
    each = share(rows)
    units = (rows + each - 1) // each
    unit = take(counts, phase)
    while unit < units:
        for t in range(unit * each, min(rows, unit * each + each)):
            rotate_row(qkv, t, bias, norms, layer, eps, cos, sin, heads, kv_heads)
        leave(counts, phase)
        unit = take(counts, phase)
    settle(counts, phase, units)


@kernel(fastmath=FLAGS)
def final_norm(x: Array, y: Array, weight: Array, eps: float, out: Array) -> None:
    """x += y, then ``out`` = its RMS norm, [rows, hidden]."""
    for t in range(x.shape[0]):
        add_and_norm(x, y, t, weight, eps, out[t])


@kernel()
def look_up_bytes(table: Array, scale: Array, tokens: Array, out: Array) -> None:
    """Rows of an int8 table times their scales, as float32."""
    for t in range(tokens.shape[0]):
        for j in range(table.shape[1]):
            out[t, j] = np.float32(table[tokens[t], j]) * scale[tokens[t]]


@kernel()
def look_up_halves(table: Array, tokens: Array, out: Array) -> None:
    """Rows of a bfloat16 table (uint16), as float32."""
    for t in range(tokens.shape[0]):
        for j in range(table.shape[1]):
            out[t, j] = as_float(np.uint32(table[tokens[t], j]) << np.uint32(16))
