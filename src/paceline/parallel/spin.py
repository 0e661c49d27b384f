# SPDX-License-Identifier: Apache-2.0
"""Counters in memory that several processes share: compiled, since only compiled code can order its accesses.

A count is stored with release order and read with acquire order: who sees it also sees what was written before it.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_PAUSES = {"x86_64": ("llvm.x86.sse2.pause", ()), "aarch64": ("llvm.aarch64.hint", (1,))}
"""The instruction that leaves the core's other thread its turn, with its operands; elsewhere a loop does without."""


def _load(typing_context: Any, address: Any) -> Any:
    """The number at ``address``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), generate


def _store(typing_context: Any, address: Any, value: Any) -> Any:
    """Put ``value`` at ``address``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.store_atomic(args[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _pause(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name, operands = _PAUSES.get(platform.machine(), ("", ()))
        if name:
            word = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [word for _ in operands])
            function = cgutils.get_or_insert_function(builder.module, kind, name)
            builder.call(function, [word(operand) for operand in operands])
        return context.get_dummy_value()

    return types.void(), generate


# Inside compiled code the typing context is not passed.
load: Any = intrinsic(_load)
store: Any = intrinsic(_store)
pause: Any = intrinsic(_pause)

SPINS = 2000
"""Looks at a peer's counter before a core is offered to others: some 50 microseconds."""


@njit(cache=True, nogil=True)
def post(address: int, value: int) -> None:
    """Set the counter at ``address``."""
    store(address, value)


@njit(cache=True, nogil=True)
def read(address: int) -> int:
    """The counter at ``address``."""
    return load(address)


@njit(cache=True, nogil=True)
def behind(address: int, ranks: int, stride: int, value: int, spins: int) -> int:
    """The first of ``ranks`` counters, ``stride`` bytes apart, still below ``value`` after ``spins`` looks; else -1."""
    for rank in range(ranks):
        left = spins
        while load(address + rank * stride) < value:
            left -= 1
            if left < 0:
                return rank
            pause()
    return -1


@njit(cache=True, nogil=True)
def meet(board: Any, count: int) -> bool:
    """Post ``count``; whether all ranks have, within a short while.

    ``board``: address of the first rank's counter, numbers of each rank [ranks, ...] that lie as far apart as the
    counters do, and the own rank.
    """
    address, slots, rank = board
    stride = slots.strides[0]
    store(address + rank * stride, count)
    return behind(address, slots.shape[0], stride, count, SPINS) < 0
