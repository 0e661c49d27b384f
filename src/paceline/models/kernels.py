# SPDX-License-Identifier: Apache-2.0
"""Small operations of a decoder, fused and compiled: what lies between its matrix products.

In eager torch a step of few tokens spends more time on these than on the products. Each kernel reads and writes
every row once. Rows are independent of each other: what a row becomes does not depend on its batch.

``levels`` > 0 asks for rows ready to be rounded to integers: each is mixed as `_mix` does, which spreads outliers
over many entries, then divided by a scale of its own, so that its largest magnitude becomes ``levels``; the scale is
handed out beside it. A row that holds a number that is not
finite becomes zeros with scale NaN, so that NaN is what any product with it yields. ``levels`` = 0 leaves rows as
they are, with scale 1.

Compiled code is kept in Numba's cache (beside the source, or in the user's cache folder if that is not writable).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

Array = np.ndarray

FLAGS = {"reassoc", "contract", "arcp", "nsz"}
"""What the compiler may do to floating-point code: enough to use vector registers; NaN and infinity keep meaning."""

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


@njit(inline="always", fastmath=FLAGS)
def exponential(x: Any) -> Any:
    """exp(x) in float32 to about two units in the last place; 2^n by the exponent's bits, the rest by its series."""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0)) if x == x else x
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
def _mix(row: Any) -> None:
    """The Walsh-Hadamard transform, unnormalised and in place, along the first axis of ``row`` as [order, rest].

    As its matrix H is symmetric with H H = order, a product with weights that went through it as well is ``order``
    times the original one (the idea of QuaRot, Ashkboos et al., 2024).
    """
    size = row.shape[0]
    order = min(size & -size, 64)
    half = size // order
    while half < size:
        for begin in range(0, size, 2 * half):
            for j in range(begin, begin + half):
                a, b = row[j], row[j + half]
                row[j] = a + b
                row[j + half] = a - b
        half *= 2


@njit(inline="always", fastmath=FLAGS)
def _finish(row: Any, levels: Any) -> Any:
    """Divide a row by its scale, in place; the scale. See the module's text."""
    if levels == np.float32(0.0):
        return np.float32(1.0)
    _mix(row)
    # The magnitudes of floats are ordered as their bits are, and NaN stands above infinity.
    largest = np.uint32(0)
    for j in range(row.shape[0]):
        largest = max(largest, as_bits(row[j]) & _MAGNITUDE)
    if largest >= _NOT_FINITE:
        row[:] = np.float32(0.0)
        return np.float32(np.nan)
    if largest < np.uint32(0x00800000):
        row[:] = np.float32(0.0)
        return np.float32(0.0)
    scale = as_float(largest) / levels
    inverse = np.float32(1.0) / scale
    for j in range(row.shape[0]):
        row[j] *= inverse
    return scale


@njit(cache=True, fastmath=FLAGS, error_model="numpy", nogil=True)
def add_norm(
    x: Array, y: Array, y_scale: Array, weight: Array, eps: float, levels: float, out: Array, scale: Array
) -> None:
    """x += y * y_scale, by rows; then out = RMS norm of x (Zhang and Sennrich, 2019), scaled as the module says.

    ``x``, ``y``, ``out`` [rows, hidden]; ``y_scale``, ``scale`` [rows]; ``weight`` [hidden]; all float32.
    """
    rows, size = x.shape
    for t in range(rows):
        factor = y_scale[t]
        total = np.float32(0.0)
        for j in range(size):
            v = x[t, j] + y[t, j] * factor
            x[t, j] = v
            total += v * v
        r = np.float32(1.0) / np.sqrt(total / np.float32(size) + np.float32(eps))
        for j in range(size):
            out[t, j] = x[t, j] * r * weight[j]
        scale[t] = _finish(out[t], np.float32(levels))


@njit(cache=True, fastmath=FLAGS, error_model="numpy", nogil=True)
def rotate(
    qkv: Array,
    scale: Array,
    bias: Array,
    norms: Array,
    eps: float,
    cos: Array,
    sin: Array,
    heads: int,
    kv_heads: int,
) -> None:
    """Make queries, keys and values of a stacked product, in place.

    Rows are multiplied by their scale; ``bias`` [width] is added; if ``norms`` [2, head_dim] has entries, queries
    and keys are RMS-normalised head by head with them; then they are rotated in half-split order by ``cos`` and
    ``sin`` [rows, head_dim / 2].
    """
    rows = qkv.shape[0]
    half = cos.shape[1]
    size = 2 * half
    for t in range(rows):
        factor = scale[t]
        for j in range(qkv.shape[1]):
            qkv[t, j] = qkv[t, j] * factor + bias[j]
        for h in range(heads + kv_heads):
            head = qkv[t, h * size : (h + 1) * size]
            if norms.shape[1]:
                weight = norms[0] if h < heads else norms[1]
                total = np.float32(0.0)
                for j in range(size):
                    total += head[j] * head[j]
                r = np.float32(1.0) / np.sqrt(total / np.float32(size) + np.float32(eps))
                for j in range(size):
                    head[j] = head[j] * r * weight[j]
            for j in range(half):
                a, b = head[j], head[j + half]
                head[j] = a * cos[t, j] - b * sin[t, j]
                head[j + half] = b * cos[t, j] + a * sin[t, j]


@njit(cache=True, fastmath=FLAGS, error_model="numpy", nogil=True)
def gated(gate_up: Array, scale: Array, levels: float, out: Array, out_scale: Array) -> None:
    """out = silu(gate) * up, scaled as the module says; ``gate_up`` [rows, 2 * size] holds gate, then up."""
    rows, size = out.shape
    for t in range(rows):
        factor = scale[t]
        for j in range(size):
            g = gate_up[t, j] * factor
            out[t, j] = g / (np.float32(1.0) + exponential(-g)) * (gate_up[t, size + j] * factor)
        out_scale[t] = _finish(out[t], np.float32(levels))


@njit(cache=True, fastmath=FLAGS, error_model="numpy", nogil=True)
def scale_rows(x: Array, levels: float, scale: Array) -> None:
    """Scale the rows of ``x`` in place, as the module says."""
    for t in range(x.shape[0]):
        scale[t] = _finish(x[t], np.float32(levels))
