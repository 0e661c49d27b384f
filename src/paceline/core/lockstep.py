# SPDX-License-Identifier: Apache-2.0
"""How ranks that share collectives stay in step: votes, the agreement, and waves of activity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from paceline.core.graphs import FULL, NONE, GraphDispatcher

RUN, POLL, SLEEP = 0, 1, 2
"""What a group does in a step: a forward pass together, waiting for transfers, or nothing until woken."""


class OutOfStep(RuntimeError):
    """Ranks disagree on which step or wave this is. The process must end: better loud than out of step."""


class Vote(msgspec.Struct, frozen=True, gc=False):
    """What one rank brings to a step.

    ``tokens``, ``requests``: sizes of its plan. ``width``: common width of its decode rows, 0 if not uniform.
    ``mode``: the graph mode it wishes, every local reason for running eagerly included. ``has_work``:
    unfinished requests or transfers. ``draft_passes``: forward passes its drafter will make.
    """

    step: int
    wave: int
    tokens: int
    requests: int
    width: int
    mode: int
    has_work: bool
    draft_passes: int = 0
    stop: bool = False


class Agreement(msgspec.Struct, frozen=True, gc=False):
    """What all ranks do in a step; every rank computes the same one from the same votes.

    ``size``: tokens to which each rank pads in FULL, 0 when eager. ``tokens_by_rank``: tokens that each rank
    exchanges with experts, a rank without rows counting as the dummy of W tokens that it runs.
    """

    step: int
    run: int
    mode: int
    size: int
    tokens_by_rank: tuple[int, ...]
    draft_passes: int
    stop: bool


def agree(votes: Sequence[Vote], graphs: GraphDispatcher) -> Agreement:
    """Join the votes of all ranks (in rank order) into the one decision of the group.

    A rank without rows is ignored for mode and width, so an idle rank never costs the others their graph.

    Raises:
        OutOfStep: two votes name different steps or waves.
    """
    step, wave = votes[0].step, votes[0].wave
    width = most = passes = 0
    full, work, stop = True, False, False
    for v in votes:
        if v.step != step or v.wave != wave:
            raise OutOfStep(f"votes for step {step} of wave {wave} and for step {v.step} of wave {v.wave}")
        if v.tokens:
            if v.tokens > most:
                most = v.tokens
            if v.mode != FULL or not v.width or (width and v.width != width):
                full = False
            width = v.width
            if v.draft_passes > passes:
                passes = v.draft_passes
        work = work or v.has_work
        stop = stop or v.stop
    if not most:
        return Agreement(step, POLL if work else SLEEP, NONE, 0, (0,) * len(votes), 0, stop)
    dummy = graphs.width
    tokens = tuple([v.tokens or dummy for v in votes])
    size = graphs.size_for(most) if full else 0
    return Agreement(step, RUN, FULL if size else NONE, size, tokens, passes, stop)


class Wave:
    """One rank's view of the group's activity: wave w, awake or asleep.

    A wave is a stretch of steps between two sleeps. Messages between ranks are wake(v): "wave v begins". Requests
    carry no wave: stamping them loses wake-ups.
    """

    __slots__ = ("awake", "number")

    def __init__(self) -> None:
        self.number = 0
        self.awake = True

    def at_begin(self, wakes: Iterable[int]) -> None:
        """Awake, before planning: wake-ups of this or an earlier wave are old news.

        Raises:
            OutOfStep: a peer began a later wave while this rank is still in an earlier one.
        """
        for v in wakes:
            if v > self.number:
                raise OutOfStep(f"wake({v}) reached a rank that is awake in wave {self.number}")

    def sleep(self) -> None:
        """The group agreed that nobody has work."""
        self.awake = False

    def at_sleep(self, *, new_work: bool, wakes: Iterable[int]) -> int | None:
        """Asleep, with an inbox: ``new_work`` is a request or a stop, even one that was aborted since.

        Returns:
            The wave number to send to all other ranks, or None when nothing is to be sent. ``awake`` tells
            whether this rank goes on to the next step. An abort alone wakes nobody.

        Raises:
            OutOfStep: a wake-up skips a wave.
        """
        newest = max(wakes, default=self.number)
        if newest > self.number + 1:
            raise OutOfStep(f"wake({newest}) reached a rank that sleeps after wave {self.number}")
        if not new_work and newest <= self.number:
            return None
        self.number += 1
        self.awake = True
        return self.number if new_work else None
