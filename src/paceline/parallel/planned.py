# SPDX-License-Identifier: Apache-2.0
"""The planned form of the exchange in memory: two compiled calls a layer, into buffers that stay where they are.

Ranks meet as in `paceline.parallel.shared`, at the same counters and over the same bytes: a peer may as well compute
its share of the step operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit

from paceline.models.kernels import Array
from paceline.models.planned import Tokens
from paceline.parallel import spin
from paceline.parallel.board import ROWS_BYTES, Board
from paceline.parallel.wire import Wire

_LATE, _DIFFER, _MANY = -1, -2, -3
"""Instead of a number of tokens: a peer has not come yet; ranks do not exchange the same; there is no room for all."""


@njit(cache=True, nogil=True)
def _dispatch(board: Any, count: int, memory: Any, terms: Any, tokens: Any, counts: Any, out: Any) -> int:
    """Leave ``tokens`` for all, meet, and see `_take`; or `_LATE`.

    Args:
        board: address of the counters, slots of numbers [ranks, 2, numbers], and this rank.
        count: of meetings so far, this one included.
        memory: all ranks' memory as float32 and as int32; numbers between one rank's memory and the next.
        terms: what must be the same on all ranks, beginning with the bytes of a row.
        tokens: see `Tokens`.
        counts: how many tokens each rank brought, filled.
        out: tokens of all ranks, filled; as ``tokens``.
    """
    _, slots, rank = board
    numbers, marks, stride = memory
    hidden, experts, weights = tokens
    size, top_k = hidden.shape[1], experts.shape[1]
    for t in range(hidden.shape[0]):
        at = rank * stride + t * (terms[0] // 4)
        for j in range(size):
            numbers[at + j] = hidden[t, j]
        for k in range(top_k):
            numbers[at + size + k] = weights[t, k]
            marks[at + size + top_k + k] = experts[t, k]
    own = slots[rank, count % 2]
    own[0], own[1] = 1 + len(terms), hidden.shape[0]
    for i in range(len(terms)):
        own[2 + i] = terms[i]
    if not spin.meet(board, count):
        return _LATE
    return _take(board, count, memory, counts, out)


@njit(cache=True, nogil=True)
def _take(board: Any, count: int, memory: Any, counts: Any, out: Any) -> int:
    """All ranks' tokens, one rank after the other; how many, or `_DIFFER`, or `_MANY`."""
    _, slots, rank = board
    numbers, marks, stride = memory
    hidden, experts, weights = out
    size, top_k = hidden.shape[1], experts.shape[1]
    own, total = slots[rank, count % 2], 0
    for r in range(slots.shape[0]):
        words = slots[r, count % 2]
        for i in range(1 + own[0]):
            if i != 1 and words[i] != own[i]:
                return _DIFFER
        counts[r] = words[1]
        if total + counts[r] > hidden.shape[0]:
            return _MANY
        for t in range(words[1]):
            at = r * stride + t * (words[2] // 4)
            for j in range(size):
                hidden[total, j] = numbers[at + j]
            for k in range(top_k):
                weights[total, k] = numbers[at + size + k]
                experts[total, k] = marks[at + size + top_k + k]
            total += 1
    return total


@njit(cache=True, nogil=True)
def _combine(board: Any, count: int, sums: Any, partial: Any, counts: Any, out: Any) -> bool:
    """Leave ``partial`` for all, meet, and see `_add_up`; False: a peer has not come yet.

    ``sums``: see ``memory`` of `_dispatch`; then where in a rank's memory sums begin.
    """
    _, slots, rank = board
    numbers, _, stride, sums_at = sums
    size = partial.shape[1]
    for t in range(partial.shape[0]):
        at = rank * stride + sums_at + t * size
        for j in range(size):
            numbers[at + j] = partial[t, j]
    slots[rank, count % 2, 0] = 0
    if not spin.meet(board, count):
        return False
    _add_up(board, sums, counts, out)
    return True


@njit(cache=True, nogil=True)
def _add_up(board: Any, sums: Any, counts: Any, out: Any) -> None:
    """What all ranks computed for this rank's tokens, added in rank order."""
    _, slots, rank = board
    numbers, _, stride, sums_at = sums
    size, first = out.shape[1], 0
    for r in range(rank):
        first += counts[r]
    for t in range(out.shape[0]):
        at = sums_at + (first + t) * size
        for j in range(size):
            out[t, j] = numbers[at + j]
        for _ in range(1, slots.shape[0]):
            at += stride
            for j in range(size):
                out[t, j] += numbers[at + j]


Terms = tuple[int, int, int, int]
"""What ranks must agree on to understand each other: bytes of a row, experts, mode, size."""


class PlannedShared:
    """See `PlannedExchange`: the planned form of a `SharedExchange`."""

    def __init__(self, board: Board, tokens: int, wire: Wire, terms: Callable[[int], Terms]) -> None:
        """For passes of at most ``tokens`` tokens a rank; ``terms`` are those of a pass with so many."""
        self._board, self._terms = board, terms
        self._meet = board.address, board.slots, board.rank
        numbers = board.areas.view(torch.float32)
        flat = numbers.view(-1)
        self._memory = flat.numpy(), flat.view(torch.int32).numpy(), numbers.shape[1]
        self._sums = *self._memory, ROWS_BYTES // numbers.itemsize
        self._counts = np.zeros(board.ranks, dtype=np.int64)
        every, size, top_k = tokens * board.ranks, wire.hidden_size, wire.top_k
        self._all: Tokens = (
            np.empty((every, size), dtype=np.float32),
            np.empty((every, top_k), dtype=np.int64),
            np.empty((every, top_k), dtype=np.float32),
        )
        out = np.empty((tokens, size), dtype=np.float32)
        hidden, experts, weights = self._all
        self._arrived = [(hidden[:n], experts[:n], weights[:n]) for n in range(every + 1)]
        self._own = [out[:n] for n in range(tokens + 1)]
        self._brought = 0

    def dispatch(self, tokens: Tokens) -> Tokens:
        """See `PlannedExchange`.

        Raises:
            RuntimeError, ValueError, PeerLost: see `SharedExchange.dispatch`.
        """
        board = self._board
        self._brought = len(tokens[0])
        terms, count = self._terms(self._brought), board.next()
        total = _dispatch(self._meet, count, self._memory, terms, tokens, self._counts, self._all)
        if total == _LATE:
            board.wait()
            total = _take(self._meet, count, self._memory, self._counts, self._all)
        if total < 0:
            shared = board.shared()
            check_terms(shared)
            brought = [row[0] for row in shared]
            raise ValueError(f"ranks brought {brought} tokens, and {len(self._all[0])} in all are planned for")
        return self._arrived[total]

    def combine(self, partial: Array) -> Array:
        """See `PlannedExchange`.

        Raises:
            PeerLost: a rank did not come in time.
        """
        out = self._own[self._brought]
        if not _combine(self._meet, self._board.next(), self._sums, partial, self._counts, out):
            self._board.wait()
            _add_up(self._meet, self._sums, self._counts, out)
        return out


def check_terms(shared: list[list[int]]) -> None:
    """Refuse what ranks have left for each other, tokens and `Terms`, if it is not meant for one exchange.

    Raises:
        RuntimeError: terms differ.
    """
    terms = [row[1:] for row in shared]
    if any(found != terms[0] for found in terms):
        raise RuntimeError(f"ranks differ in (row bytes, experts, mode, size): {terms}; they are out of step")
