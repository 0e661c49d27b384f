# SPDX-License-Identifier: Apache-2.0
"""What ranks in processes of their own need to keep one line: a way to join their votes, and how long they waited."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

from paceline.core.lockstep import Vote

JOIN_TIMEOUT_S = 1800.0
"""How long the ranks of a group wait for each other to come; one that dies meanwhile is noticed by its supervisor."""
VOTE_FIELDS = 9
"""Integers of a vote on the wire."""
WAIT_BOUNDS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Upper bounds of the histogram of waits at the vote, in seconds; a further bucket takes what is longer."""


class PeerLost(RuntimeError):
    """A collective did not complete: another rank has died, or has not come within the deadline."""


def by_a_peer(error: BaseException) -> bool:
    """Whether an exception of torch.distributed tells of a collective that failed, which is a peer's doing."""
    return any(backend in str(error) for backend in ("gloo", "NCCL"))


def named(ranks: Sequence[int]) -> str:
    """Ranks in words, at least one."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


class VoteExchange(Protocol):
    """The one small collective with which a step begins."""

    def join(self, vote: Vote) -> Sequence[Vote]:
        """The votes of all ranks, in rank order, once all of them have cast theirs.

        Raises:
            PeerLost: somebody has not.
        """
        ...


def pack_vote(vote: Vote) -> tuple[int, ...]:
    """A vote as `VOTE_FIELDS` integers."""
    return (
        vote.step,
        vote.wave,
        vote.tokens,
        vote.requests,
        vote.width,
        vote.mode,
        vote.has_work,
        vote.draft_passes,
        vote.stop,
    )


def unpack_vote(fields: Sequence[int]) -> Vote:
    """The inverse of `pack_vote`."""
    step, wave, tokens, requests, width, mode, has_work, draft_passes, stop = fields
    return Vote(step, wave, tokens, requests, width, mode, has_work != 0, draft_passes, stop != 0)


class WaitTimes:
    """How long a rank waited for the others, in total (seconds) and by bucket of `WAIT_BOUNDS_S`."""

    __slots__ = ("buckets", "total_s")

    def __init__(self) -> None:
        self.total_s = 0.0
        self.buckets = [0] * (len(WAIT_BOUNDS_S) + 1)

    def add(self, seconds: float) -> None:
        self.total_s += seconds
        self.buckets[bisect_left(WAIT_BOUNDS_S, seconds)] += 1
