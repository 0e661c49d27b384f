# SPDX-License-Identifier: Apache-2.0
"""Ranks on the CPUs of one host meet in memory: a few microseconds, where a socket takes hundreds.

A layer of a mixture, by two ranks (each phase ends when all have posted it):

    rank 0   rows to its area | post | wait | read all rows, compute | sums to its area | post | wait | add up | ...
    rank 1   rows to its area | post | wait | read all rows, compute | sums to its area | post | wait | add up | ...

Rows and sums have places of their own, so nothing is overwritten that a peer may still read: who writes rows again has
seen that all posted their sums, after they read the rows; and the other way round.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.engine.line import PeerLost, named
from paceline.models.experts import Placement, Routed
from paceline.parallel import spin
from paceline.parallel.wire import Views, Wire, pack, unpack

ROWS_BYTES = 1 << 28
"""Room for one rank's rows, and for its sums of each rank's tokens; memory is taken only as it is used."""

WORDS = 15
"""Numbers that a rank can share at a time."""

_TOKEN_BYTES = 16
_LINE = 64
_SLOT = 8 * (WORDS + 1)
_HEADER = _LINE + 2 * _SLOT
"""Per rank: a line with its counter, then two slots of numbers in turn."""

SPINS = 2000
"""Looks at a peer's counter before a core is offered to others: some 50 microseconds."""

PATIENT_S = 0.002
"""After so long a wait sleeps between looks: a peer computes something long."""

NAP_S = 50e-6

WORRY_S = 30.0
"""After so long a wait, or half of the time after which a rank gives up, it says for whom it waits."""

VIEWS = 4096
"""Views kept at most: of numbers of tokens that occurred."""


class Board:
    """A mapped memory in which ranks count their common steps and leave each other numbers and bytes."""

    def __init__(self, memory: mmap.mmap, rank: int, ranks: int, timeout_s: float) -> None:
        self.rank = rank
        self.ranks = ranks
        self.timeout_s = timeout_s
        self._memory = memory
        self._bytes = np.frombuffer(memory, dtype=np.uint8)
        self._address = int(self._bytes.ctypes.data) + _LINE
        self._count = 0
        words = self._bytes[_LINE : _LINE + ranks * _HEADER].view(np.int64).reshape(ranks, _HEADER // 8)
        self._slots = words[:, _LINE // 8 :].reshape(ranks, 2, _SLOT // 8)
        self._areas = torch.from_numpy(self._bytes[_areas_at(ranks) :]).view(ranks, -1)

    def rows(self, rank: int) -> Tensor:
        """Bytes for the rows of ``rank``."""
        return self._areas[rank, :ROWS_BYTES]

    def sums(self, rank: int) -> Tensor:
        """Bytes for the sums that ``rank`` computed."""
        return self._areas[rank, ROWS_BYTES:]

    def share(self, *values: int) -> list[list[int]]:
        """Leave at most `WORDS` integers, and get those of all ranks, in rank order, once all have called it.

        Whatever a rank wrote before its call is visible to all after theirs.

        Raises:
            PeerLost: a rank did not come within ``timeout_s`` seconds.
        """
        self._count += 1
        turn = self._count % 2
        slot = self._slots[self.rank, turn]
        slot[0] = len(values)
        slot[1 : 1 + len(values)] = values
        spin.post(self._address + self.rank * _HEADER, self._count)
        self._wait()
        return [row[1 : 1 + row[0]] for row in self._slots[:, turn].tolist()]

    def _wait(self) -> None:
        late = spin.behind(self._address, self.ranks, _HEADER, self._count, SPINS)
        began, worry = time.perf_counter(), min(WORRY_S, self.timeout_s / 2)
        while late >= 0:
            waited = time.perf_counter() - began
            if waited > worry:
                worry = self.timeout_s
                print(
                    f"rank {self.rank} has waited {waited:.1f} s for {self._late(late)} at a common step, and gives up"
                    f" after {self.timeout_s:g} s (distributed_timeout_seconds)",
                    file=sys.stderr,
                    flush=True,
                )
            patient = waited > PATIENT_S
            if patient:
                time.sleep(NAP_S)
            else:
                os.sched_yield()
            late = spin.behind(self._address, self.ranks, _HEADER, self._count, 1 if patient else SPINS)
            # By a look that is younger than the clock's: all may have been stopped together, and gone on.
            if late >= 0 and waited > self.timeout_s:
                raise PeerLost(f"{self._late(late)} did not come to a common step within {self.timeout_s} s")

    def _late(self, first: int) -> str:
        """The ranks that have not posted the current count, of which ``first`` was the first to be noticed."""
        behind = [r for r in range(self.ranks) if spin.read(self._address + r * _HEADER) < self._count]
        return named(behind or [first])


def _areas_at(ranks: int) -> int:
    """Where rows and sums begin, in bytes."""
    return -(-(_LINE + ranks * _HEADER) // mmap.PAGESIZE) * mmap.PAGESIZE


def map_shared(timeout_s: float, group: dist.ProcessGroup | None = None) -> Board | None:
    """A board for the ranks of ``group``, None on all if one of them cannot reach the memory of the first.

    The memory has no name in any file system, so nothing is left behind however the processes end; peers find it
    through /proc, which works between processes of one user on one Linux host.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    length = _areas_at(ranks) + ranks * (1 + ranks) * ROWS_BYTES
    token = secrets.token_bytes(_TOKEN_BYTES)
    offer: list[tuple[str, bytes] | None] = [None]
    handle, memory = -1, None
    if rank == 0:
        with contextlib.suppress(AttributeError, OSError):
            handle = os.memfd_create("paceline-exchange", os.MFD_CLOEXEC)
            os.ftruncate(handle, length)
            memory = mmap.mmap(handle, length)
            memory[:_TOKEN_BYTES] = token
            offer = [(f"/proc/{os.getpid()}/fd/{handle}", token)]
    dist.broadcast_object_list(offer, group_src=0, group=group)
    if rank and offer[0] is not None:
        path, token = offer[0]
        with contextlib.suppress(OSError, ValueError):
            memory = _open(path, length, token)
    reached: list[bool] = [False] * ranks
    dist.all_gather_object(reached, memory is not None, group=group)
    if handle >= 0:
        os.close(handle)
    if memory is None or not all(reached):
        return None
    return Board(memory, rank, ranks, timeout_s)


def _open(path: str, length: int, token: bytes) -> mmap.mmap | None:
    """The memory at ``path``; None if that is another process's, as it may be in another container."""
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(handle, length)
    finally:
        os.close(handle)
    return memory if memory[:_TOKEN_BYTES] == token else None


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

    def dispatch(self, tokens: Routed, placement: Placement) -> Routed:
        """See `ExpertExchange`.

        Raises:
            RuntimeError: `begin` was not called, or ranks differ in what they exchange.
            ValueError: more tokens than the size agreed on, or than there is room for.
            PeerLost: a rank did not come in time.
        """
        if self._mode is None:
            raise RuntimeError("begin() must precede the first forward of a model whose experts several ranks share")
        count = len(tokens.hidden)
        if self._size and count > self._size:
            raise ValueError(f"{count} tokens on rank {self.rank}, but {self._size} were agreed on")
        wire = Wire.of(tokens)
        room = ROWS_BYTES // wire.row_bytes
        if count > room:
            raise ValueError(f"{count} tokens of {wire.row_bytes} bytes are too many to exchange at once, {room} fit")
        pack(tokens, self._rows_of(self.rank, count, wire))
        shared = self.board.share(count, wire.row_bytes, placement.num_experts, self._mode, self._size)
        terms = [row[1:] for row in shared]
        if any(found != terms[0] for found in terms):
            raise RuntimeError(f"ranks differ in (row bytes, experts, mode, size): {terms}; they are out of step")
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
