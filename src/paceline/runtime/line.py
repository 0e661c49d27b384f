# SPDX-License-Identifier: Apache-2.0
"""The step loop of a rank in lock-step: every step of the group is a vote, and then the same thing on every rank.

    read inbox | plan | vote ==== agree ==== | RUN:   launch ... collect | finish | outputs | again
                                             | POLL:  the same without a forward, after up to 1 ms of waiting
                                             | SLEEP: the wave is over; blocked in poll until the next one begins

From the vote to the end of the step the inbox is not read, so nothing that others wait for can change. This process
blocks in three places only: in collectives (which have a deadline), in a POLL (1 ms), and asleep (without CPU).
"""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from paceline.core.graphs import GraphDispatcher
from paceline.core.lockstep import POLL, SLEEP, Agreement, Wave, agree
from paceline.engine.line import VoteExchange, WaitTimes
from paceline.engine.messages import Wake, encode
from paceline.engine.rank import Rank
from paceline.runtime.loop import WAITING_POLL_MS, Desk, LinkClosed

STOPPING = "the server is shutting down"


class LineLoop:
    """Runs a rank in step with its peers until a stop is agreed on, or the parent's end of the link is closed."""

    def __init__(
        self,
        rank: Rank,
        desk: Desk,
        votes: VoteExchange,
        peers: Sequence[zmq.Socket[bytes]],
        waits: WaitTimes,
    ) -> None:
        """``peers``: PUSH sockets to the inboxes of all other ranks. ``waits`` takes in the time spent on votes."""
        self._rank = rank
        self._desk = desk
        self._votes = votes
        self._peers = peers
        self._waits = waits
        self._graphs = GraphDispatcher(rank.scheduler.config)
        self._wave = Wave()
        self._step = 0
        self._stop = False

    def run(self) -> None:
        """Step while anybody has work, sleep while nobody has.

        Raises:
            PeerLost: another rank has died or does not come.
            OutOfStep: ranks disagree on where they are.
        """
        self._desk.leftovers()
        try:
            while True:
                agreement = self._begin()
                if agreement.run != SLEEP:
                    self._run(agreement)
                elif agreement.stop:
                    self._desk.leftovers()
                    return
                else:
                    self._sleep()
        except LinkClosed:
            return

    def _begin(self) -> Agreement:
        """Read, plan, vote. The first vote of all is the start barrier."""
        desk, rank = self._desk, self._rank
        heard = desk.read()
        self._wave.at_begin(heard.wakes)
        self._stop = self._stop or heard.stop
        self._began = desk.clock()
        rank.begin(self._began)
        vote = rank.vote(self._step, self._wave.number, stop=self._stop)
        asked = desk.clock()
        votes = self._votes.join(vote)
        self._waits.add(desk.clock() - asked)
        agreement = agree(votes, self._graphs)
        self._step += 1
        if agreement.stop:
            desk.closed = STOPPING
        return agreement

    def _run(self, agreement: Agreement) -> None:
        desk, rank = self._desk, self._rank
        rank.launch(agreement)
        if agreement.run == POLL:
            # Wait first, then report every event, or a transfer that ends while waiting is told a step too late.
            desk.wait(WAITING_POLL_MS)
        desk.report(rank.plan, rank.finish(rank.collect(), desk.clock()), self._began)

    def _sleep(self) -> None:
        """Until the next wave begins: with a request or a stop here, or with a peer's wake-up."""
        desk, wave = self._desk, self._wave
        wave.sleep()
        heard = desk.read()
        while True:
            self._stop = self._stop or heard.stop
            # Even a request that was aborted or refused since is new work: what it left behind is told in a step.
            began = wave.at_sleep(new_work=heard.request or heard.stop, wakes=heard.wakes)
            if began is not None:
                for peer in self._peers:
                    peer.send(encode([Wake(began)]))
            if wave.awake:
                return
            desk.leftovers()
            heard = desk.read(None)
