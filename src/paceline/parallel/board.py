# SPDX-License-Identifier: Apache-2.0
"""Ranks on the CPUs of one host meet in memory: a few microseconds, where a socket takes hundreds."""

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
from paceline.parallel import spin

ROWS_BYTES = 1 << 28
"""Room for one rank's rows, and for its sums of each rank's tokens; memory is taken only as it is used."""

WORDS = 15
"""Numbers that a rank can share at a time."""

_TOKEN_BYTES = 16
_LINE = 64
_SLOT = 8 * (WORDS + 1)
_HEADER = _LINE + 2 * _SLOT
"""Per rank: a line with its counter, then two slots of numbers in turn."""

PATIENT_S = 0.002
"""After so long a wait sleeps between looks: a peer computes something long."""

NAP_S = 50e-6

WORRY_S = 30.0
"""After so long a wait, or half of the time after which a rank gives up, it says for whom it waits."""


class Board:
    """A mapped memory in which ranks count their common steps and leave each other numbers and bytes.

    ``address``: of the counter of rank 0. ``slots`` [ranks, 2, 1 + WORDS], as far apart as the counters: the numbers
    of odd and of even steps, how many of them first. ``areas`` [ranks, bytes]: room for rows, then for sums.
    """

    def __init__(self, memory: mmap.mmap, rank: int, ranks: int, timeout_s: float) -> None:
        self.rank = rank
        self.ranks = ranks
        self.timeout_s = timeout_s
        self._memory = memory
        self._bytes = np.frombuffer(memory, dtype=np.uint8)
        self.address = int(self._bytes.ctypes.data) + _LINE
        self._count = 0
        words = self._bytes[_LINE : _LINE + ranks * _HEADER].view(np.int64).reshape(ranks, _HEADER // 8)
        self.slots = words[:, _LINE // 8 :].reshape(ranks, 2, _SLOT // 8)
        self.areas = torch.from_numpy(self._bytes[_areas_at(ranks) :]).view(ranks, -1)

    def rows(self, rank: int) -> Tensor:
        """Bytes for the rows of ``rank``."""
        return self.areas[rank, :ROWS_BYTES]

    def sums(self, rank: int) -> Tensor:
        """Bytes for the sums that ``rank`` computed."""
        return self.areas[rank, ROWS_BYTES:]

    def share(self, *values: int) -> list[list[int]]:
        """Leave at most `WORDS` integers, and get those of all ranks, in rank order, once all have called it.

        Whatever a rank wrote before its call is visible to all after theirs.

        Raises:
            PeerLost: a rank did not come within ``timeout_s`` seconds.
        """
        slot = self.slots[self.rank, self.next() % 2]
        slot[0] = len(values)
        slot[1 : 1 + len(values)] = values
        spin.post(self.address + self.rank * _HEADER, self._count)
        self.wait()
        return self.shared()

    def next(self) -> int:
        """Begin a common step without `share`; its number, which this rank is to post, and whose parity says where
        numbers lie."""
        self._count += 1
        return self._count

    def shared(self) -> list[list[int]]:
        """What all ranks have left in this step."""
        return [row[1 : 1 + row[0]] for row in self.slots[:, self._count % 2].tolist()]

    def wait(self) -> None:
        """Return when all have posted this step.

        Raises:
            PeerLost: a rank did not come within ``timeout_s`` seconds.
        """
        late = spin.behind(self.address, self.ranks, _HEADER, self._count, spin.SPINS)
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
            late = spin.behind(self.address, self.ranks, _HEADER, self._count, 1 if patient else spin.SPINS)
            # By a look that is younger than the clock's: all may have been stopped together, and gone on.
            if late >= 0 and waited > self.timeout_s:
                raise PeerLost(f"{self._late(late)} did not come to a common step within {self.timeout_s} s")

    def _late(self, first: int) -> str:
        """The ranks that have not posted the current count, of which ``first`` was the first to be noticed."""
        behind = [r for r in range(self.ranks) if spin.read(self.address + r * _HEADER) < self._count]
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
