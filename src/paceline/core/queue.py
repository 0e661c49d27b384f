# SPDX-License-Identifier: Apache-2.0
"""The waiting queue under either policy."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator

from paceline.core.config import Policy
from paceline.core.request import Request


def rank_key(request: Request) -> tuple[int, float, int]:
    """One total order under the priority policy, worst last: ties would let two requests preempt each other."""
    return (request.priority, request.arrival, request.seq)


class RequestQueue:
    """First come first served, or sorted by `rank_key`."""

    __slots__ = ("_items", "_sorted")

    def __init__(self, policy: Policy) -> None:
        self._sorted = policy == "priority"
        self._items: deque[Request] = deque()

    def add(self, request: Request) -> None:
        """Queue a newcomer."""
        if self._sorted:
            insort(self._items, request, key=rank_key)
        else:
            self._items.append(request)

    def put_back(self, request: Request) -> None:
        """Return a request that was preempted, or looked at and not taken, to the head or its sorted place."""
        if self._sorted:
            insort(self._items, request, key=rank_key)
        else:
            self._items.appendleft(request)

    def pop(self) -> Request:
        return self._items.popleft()

    def remove(self, request: Request) -> None:
        self._items.remove(request)

    def __contains__(self, request: Request) -> bool:
        return request in self._items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._items)
