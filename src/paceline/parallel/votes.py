# SPDX-License-Identifier: Apache-2.0
"""The votes of a step, joined over torch.distributed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from paceline.core.lockstep import Vote
from paceline.engine.line import VOTE_FIELDS, PeerLost, pack_vote, unpack_vote
from paceline.parallel.board import Board
from paceline.parallel.roll import SIGN_AFTER_S, Roll, first_line

VOTE = "vote"
"""Votes on the roll, by step."""


class GlooVotes:
    """One all-gather of `VOTE_FIELDS` integers per rank, on the CPU, in a group of its own."""

    def __init__(self, deadline_s: float, roll: Roll | None = None, *, join_timeout_s: float | None = None) -> None:
        """Called on all ranks of the default process group, in the same order among its other new groups.

        ``deadline_s``: how long a rank waits for the slowest before it gives the group up, here and in the collectives
        of the default group; the first vote, before which each does what is done once, may take ``join_timeout_s``.
        ``roll``: by which it then knows who did not come, since gloo does not say.
        """
        self._deadline_s = deadline_s
        self._settled = False
        self._roll = roll
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=join_timeout_s or deadline_s))
        self._mine = torch.zeros(VOTE_FIELDS, dtype=torch.int64)
        self._all = torch.zeros(dist.get_world_size(), VOTE_FIELDS, dtype=torch.int64)
        # Views of one buffer, in which the others' votes arrive.
        self._rows = list(self._all)
        self._fields = self._mine.numpy()

    def join(self, vote: Vote) -> Sequence[Vote]:
        """The votes of all ranks, in rank order.

        Raises:
            PeerLost: a rank has died, or did not come before the deadline.
        """
        self._fields[:] = pack_vote(vote)
        began = time.monotonic()
        try:
            work = dist.all_gather(self._rows, self._mine, group=self._group, async_op=True)
            assert work is not None
            self._wait(work, vote.step)
        except RuntimeError as error:
            reason = first_line(error)
            # A connection that ends earlier is that of a process that has died, of which others know more.
            if self._roll is not None and time.monotonic() - began > 0.9 * self._deadline_s:
                reason += self._roll.absent(VOTE, vote.step)
            raise PeerLost(f"the vote of step {vote.step} did not complete: {reason}") from error
        if not self._settled:
            self._settled = True
            for group in (None, self._group):
                _set_pg_timeout(timedelta(seconds=self._deadline_s), group)
        return [unpack_vote(fields) for fields in self._all.tolist()]

    def _wait(self, work: dist.Work, step: int) -> None:
        if self._roll is not None:
            try:
                work.wait(timedelta(seconds=SIGN_AFTER_S))
            except RuntimeError:
                # Raised anew below if the work has failed, and nothing if it completed just now.
                if not work.is_completed():
                    self._roll.sign(VOTE, step)
            else:
                return
        work.wait()


class SharedVotes:
    """The same through memory that all ranks map, for ranks of one host: tens of microseconds.

    A rank that dies is missed only after the board's deadline, so somebody has to watch the processes.
    """

    def __init__(self, board: Board, deadline_s: float) -> None:
        """``deadline_s``: the board's, from the second vote on; before the first each does what is done once."""
        self._board = board
        self._deadline_s = deadline_s

    def join(self, vote: Vote) -> Sequence[Vote]:
        """The votes of all ranks, in rank order.

        Raises:
            PeerLost: a rank did not come before the deadline.
        """
        votes = self._board.share(*pack_vote(vote))
        self._board.timeout_s = self._deadline_s
        return [unpack_vote(fields) for fields in votes]
