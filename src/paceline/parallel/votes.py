# SPDX-License-Identifier: Apache-2.0
"""The votes of a step, joined over torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.core.lockstep import Vote
from paceline.engine.line import VOTE_FIELDS, PeerLost, pack_vote, unpack_vote
from paceline.parallel.shared import Board


class GlooVotes:
    """One all-gather of `VOTE_FIELDS` integers per rank, on the CPU, in a group of its own."""

    def __init__(self, deadline_s: float) -> None:
        """Called on all ranks of the default process group, in the same order among its other new groups.

        ``deadline_s``: how long a rank waits for the slowest before it gives the group up.
        """
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
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
        try:
            dist.all_gather(self._rows, self._mine, group=self._group)
        except RuntimeError as error:
            raise PeerLost(f"the vote of step {vote.step} did not complete: {first_line(error)}") from error
        return [unpack_vote(fields) for fields in self._all.tolist()]


class SharedVotes:
    """The same through memory that all ranks map, for ranks of one host: tens of microseconds.

    A rank that dies is missed only after the board's deadline, so somebody has to watch the processes.
    """

    def __init__(self, board: Board) -> None:
        self._board = board

    def join(self, vote: Vote) -> Sequence[Vote]:
        """The votes of all ranks, in rank order.

        Raises:
            PeerLost: a rank did not come before the deadline.
        """
        return [unpack_vote(fields) for fields in self._board.share(*pack_vote(vote))]


def first_line(error: BaseException) -> str:
    """What an exception of torch.distributed says, without the stack that it may carry."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
