# SPDX-License-Identifier: Apache-2.0
"""Which rank takes a request: the score that a front end minimises over the ranks it may choose from."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paceline.core.config import ConfigError


class RankLoad(msgspec.Struct, frozen=True):
    """What a rank publishes: requests waiting and running, and the share of its KV blocks in use (0 to 1)."""

    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0


class RankBalancer:
    """One front end's choice among its ranks (all of them, or its node's own in a hybrid set-up).

    score = max(clients x own in flight, waiting + running) + 6 x waiting x max(0, kv_usage - 0.5); the strict minimum
    wins and the scan starts one rank further each time, staggered by client. A pick counts as waiting, once for
    each client that may be doing the same, until the next snapshot of loads arrives.
    """

    def __init__(self, num_ranks: int, *, clients: int = 1, client_index: int = 0) -> None:
        self.num_ranks = num_ranks
        self.clients = clients
        self._start = client_index * num_ranks // clients
        self._in_flight = [0] * num_ranks
        self._waiting = [0] * num_ranks
        self._running = [0] * num_ranks
        self._usage = [0.0] * num_ranks

    def snapshot(self, loads: Sequence[RankLoad]) -> None:
        """Replace what is known of the ranks' queues (published every 100 ms)."""
        for i, load in enumerate(loads):
            self._waiting[i] = load.waiting
            self._running[i] = load.running
            self._usage[i] = load.kv_usage

    def score(self, rank: int) -> float:
        """How loaded ``rank`` looks from here; less is better."""
        waiting = self._waiting[rank]
        queued = max(self.clients * self._in_flight[rank], waiting + self._running[rank])
        return queued + 6 * waiting * max(0.0, self._usage[rank] - 0.5)

    def pick(self, requested_rank: int | None = None) -> int:
        """The rank for the next request; ``requested_rank`` bypasses the choice.

        Raises:
            ConfigError: the requested rank does not exist.
        """
        if requested_rank is None:
            rank = self._least()
        elif 0 <= requested_rank < self.num_ranks:
            rank = requested_rank
        else:
            raise ConfigError(
                "X-data-parallel-rank", f"must be a rank from 0 to {self.num_ranks - 1}, got {requested_rank}"
            )
        self._in_flight[rank] += 1
        self._waiting[rank] += self.clients
        return rank

    def _least(self) -> int:
        best = self._start % self.num_ranks
        least = self.score(best)
        for k in range(1, self.num_ranks):
            rank = (self._start + k) % self.num_ranks
            score = self.score(rank)
            if score < least:
                best, least = rank, score
        self._start = (self._start + 1) % self.num_ranks
        return best

    def done(self, rank: int) -> None:
        """A request of this front end left ``rank``."""
        self._in_flight[rank] -= 1


class RoundRobin:
    """A router's choice among nodes: each in turn."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._next = 0

    def pick(self) -> int:
        chosen = self._next
        self._next = (chosen + 1) % self.count
        return chosen
