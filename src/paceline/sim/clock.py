# SPDX-License-Identifier: Apache-2.0
"""Virtual time: what happens next, in an order that a seed repeats exactly."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class EventLoop:
    """Runs callbacks at virtual times (seconds). Events at the same time run in the order in which they were set."""

    __slots__ = ("_events", "_sequence", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    def at(self, time_s: float, callback: Callable[[], None]) -> None:
        """Call back at ``time_s``, which must not lie in the past."""
        if time_s < self.now:
            raise ValueError(f"an event at {time_s} s was set at {self.now} s")
        self._sequence += 1
        heapq.heappush(self._events, (time_s, self._sequence, callback))

    def run(self) -> None:
        """Until nothing is left to happen."""
        events = self._events
        pop = heapq.heappop
        while events:
            self.now, _, callback = pop(events)
            callback()
