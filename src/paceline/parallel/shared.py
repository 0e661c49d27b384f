# SPDX-License-Identifier: Apache-2.0
"""The exchange of tokens among ranks on the CPUs of one host, in memory that all of them have mapped.

A layer of a mixture, by two ranks (each phase ends when all have posted it):

    rank 0   rows to its area | post | wait | read all rows, compute | sums to its area | post | wait | add up | ...
    rank 1   rows to its area | post | wait | read all rows, compute | sums to its area | post | wait | add up | ...

Rows and sums have places of their own, so nothing is overwritten that a peer may still read: who writes rows again has
seen that all posted their sums, after they read the rows; and the other way round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.models.experts import Placement, Routed
from paceline.parallel.board import ROWS_BYTES, Board
from paceline.parallel.planned import PlannedShared, Terms, check_terms
from paceline.parallel.wire import Views, Wire, pack, unpack

VIEWS = 4096
"""Views kept at most: of numbers of tokens that occurred."""


class SharedExchange:
    """See `ExpertExchange`: tokens are read where their rank left them. In FULL and NONE alike two meetings a layer."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.rank = board.rank
        self.ranks = board.ranks
        self.inert: Tensor | None = None
        self._mode: int | None = None
        self._size = 0
        self._counts: list[int] = []
        # Making a view takes a microsecond or two, and a layer needs a dozen.
        self._rows: dict[tuple[int, int, Wire], Views] = {}
        self._sums: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}

    @staticmethod
    def room(hidden_size: int, top_k: int) -> int:
        """Tokens that a rank can bring at once, in whatever type their hidden states are."""
        return ROWS_BYTES // Wire(hidden_size, torch.float32, top_k).row_bytes

    def begin(self, mode: int, size: int, inert: Tensor | None = None) -> None:
        """See `ExpertExchange`."""
        self._mode, self._size, self.inert = mode, size, inert

    def terms(self, count: int, row_bytes: int, placement: Placement) -> Terms:
        """What is to be the same on all ranks while ``count`` tokens of this one travel in rows of ``row_bytes``.

        Raises:
            RuntimeError, ValueError: see `dispatch`.
        """
        if self._mode is None:
            raise RuntimeError("begin() must precede the first forward of a model whose experts several ranks share")
        if self._size and count > self._size:
            raise ValueError(f"{count} tokens on rank {self.rank}, but {self._size} were agreed on")
        room = ROWS_BYTES // row_bytes
        if count > room:
            raise ValueError(f"{count} tokens of {row_bytes} bytes are too many to exchange at once, {room} fit")
        return row_bytes, placement.num_experts, self._mode, self._size

    def plan(self, tokens: int, hidden_size: int, placement: Placement, top_k: int) -> PlannedShared:
        """See `PlansExchange`."""
        wire = Wire(hidden_size, torch.float32, top_k)

        def terms(count: int) -> Terms:
            return self.terms(count, wire.row_bytes, placement)

        return PlannedShared(self.board, tokens, wire, terms)

    def dispatch(self, tokens: Routed, placement: Placement) -> Routed:
        """See `ExpertExchange`.

        Raises:
            RuntimeError: `begin` was not called, or ranks differ in what they exchange.
            ValueError: more tokens than the size agreed on, or than there is room for.
            PeerLost: a rank did not come in time.
        """
        count, wire = len(tokens.hidden), Wire.of(tokens)
        terms = self.terms(count, wire.row_bytes, placement)
        pack(tokens, self._rows_of(self.rank, count, wire))
        shared = self.board.share(count, *terms)
        check_terms(shared)
        self._counts = [row[0] for row in shared]
        parts = [self._rows_of(rank, n, wire) for rank, n in enumerate(self._counts)]
        hidden, weights, experts = (torch.cat(same) for same in zip(*parts, strict=True))
        return unpack((hidden, weights, experts))

    def combine(self, partial: Tensor) -> Tensor:
        """See `ExpertExchange`.

        Raises:
            PeerLost: a rank did not come in time.
        """
        self._sums_of(self.rank, partial).copy_(partial)
        self.board.share()
        first = sum(self._counts[: self.rank])
        own = slice(first, first + self._counts[self.rank])
        out = self._sums_of(0, partial)[own].float()
        for rank in range(1, self.ranks):
            out = out + self._sums_of(rank, partial)[own]
        return out.to(partial.dtype)

    def _rows_of(self, rank: int, count: int, wire: Wire) -> Views:
        key = (rank, count, wire)
        if key not in self._rows:
            if len(self._rows) >= VIEWS:
                self._rows.clear()
            rows = self.board.rows(rank)[: count * wire.row_bytes].view(count, wire.row_bytes)
            self._rows[key] = wire.split(rows)
        return self._rows[key]

    def _sums_of(self, rank: int, like: Tensor) -> Tensor:
        key = (rank, like.shape, like.dtype)
        if key not in self._sums:
            if len(self._sums) >= VIEWS:
                self._sums.clear()
            self._sums[key] = self.board.sums(rank)[: like.nbytes].view(like.dtype).view(like.shape)
        return self._sums[key]
