# SPDX-License-Identifier: Apache-2.0
"""Threads that share the work of compiled kernels, without ever depending on each other's arrival.

A job is a sequence of phases, each a number of independent units. Whoever is there takes the next unit of a phase;
nobody enters a phase before all units of the one before are done. So a helper that comes late (it slept, or another
process has its core) costs nothing but its help: only a unit that it has begun is waited for. OpenMP's threads, by
contrast, have fixed shares, and a step takes as long as the unluckiest of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit

from paceline.models.codegen import fetch, fetch_add, give_way, kernel, pause

Array = np.ndarray

SPINS = 2000
"""Looks at a counter, some ten nanoseconds each, before a waiting thread offers its core to others."""

_NEXT, _DONE, _STRIDE = 0, 8, 16
"""Where a phase has its counters: in cache lines of their own."""


def counters(phases: int) -> Array:
    """The counters of a job, at zero."""
    return np.zeros(_STRIDE * phases, dtype=np.int64)


@njit(inline="always")
def take(counts: Any, phase: Any) -> Any:
    """The next unit of a phase; at least the number of its units if all are taken."""
    return fetch_add(counts, phase * _STRIDE + _NEXT)


@njit(inline="always")
def leave(counts: Any, phase: Any) -> None:
    """A unit is done."""
    fetch_add(counts, phase * _STRIDE + _DONE)


@kernel()
def settle(counts: Array, phase: int, units: int) -> None:
    """Wait for the end of all units of a phase."""
    spins = 0
    while fetch(counts, phase * _STRIDE + _DONE) < units:
        spins += 1
        if spins < SPINS:
            pause()
        else:
            give_way()


@njit(inline="always")
def each_unit(counts: Any, phase: Any, units: Any, body: Any, args: Any) -> None:
    """A phase: ``body(unit, args)`` for every unit that this thread gets, until all are done.

    ``body`` is a compiled function that is always inlined, so that nothing is called here.
    """
    unit = take(counts, phase)
    while unit < units:
        body(unit, args)
        leave(counts, phase)
        unit = take(counts, phase)
    settle(counts, phase, units)


@njit(inline="always")
def share(rows: Any) -> Any:
    """Rows in a unit of a phase that goes row by row."""
    return max(1, (rows + 15) // 16)


@njit(inline="always")
def _some_rows(unit: Any, args: Any) -> None:
    """``body(t, inner)`` for the rows of a unit."""
    rows, each, body, inner = args
    for t in range(unit * each, min(rows, unit * each + each)):
        body(t, inner)


@njit(inline="always")
def each_row(counts: Any, phase: Any, rows: Any, body: Any, args: Any) -> None:
    """A phase that goes row by row: as `each_unit`, with ``body(t, args)`` for each row.

    This ``body`` is called; if it calls kernels, it has to be a `kernel` itself.
    """
    each = share(rows)
    each_unit(counts, phase, (rows + each - 1) // each, _some_rows, (rows, each, body, args))


class Team:
    """The calling thread and its helpers. Of several threads that call `run` at once, the first gets the helpers."""

    def __init__(self, size: int) -> None:
        """``size`` threads in all."""
        self._lent = threading.Lock()
        self._job: tuple[Callable[..., None], tuple[Any, ...]] | None = None
        self._bells = []
        for i in range(1, size):
            bell = threading.Lock()
            bell.acquire()
            self._bells.append(bell)
            threading.Thread(target=self._help, args=(bell,), name=f"kernels-{i}", daemon=True).start()

    def run(self, function: Callable[..., None], phases: int, *args: Any) -> None:
        """Call ``function(counters, *args)``, which has given up the interpreter's lock, on every thread.

        When this returns all units are done. A helper may enter the function later: it finds no units left.
        """
        args = (counters(phases), *args)
        if not (self._bells and self._lent.acquire(blocking=False)):
            function(*args)
            return
        try:
            self._job = function, args
            for bell in self._bells:
                if bell.locked():
                    bell.release()
            function(*args)
            self._job = None
        finally:
            self._lent.release()

    def _help(self, bell: threading.Lock) -> None:
        while True:
            bell.acquire()
            job = self._job
            if job is not None:
                job[0](*job[1])
            del job


_shared: list[Team] = []


def shared_team() -> Team:
    """The team of this process: as many threads as torch uses. Made at the first call."""
    if not _shared:
        _shared.append(Team(torch.get_num_threads()))
    return _shared[0]
