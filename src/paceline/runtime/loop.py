# SPDX-License-Identifier: Apache-2.0
"""The step loop of an engine process that shares no collectives, and what every loop says and hears.

inbox:     read whole, without blocking, before each step; a step in flight is never disturbed
outbox:    one message per step
idle:      asleep in poll, without CPU, until a message comes or the parent process ends
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import zmq

from paceline.core.plan import StepOutput, StepPlan
from paceline.core.scheduler import RequestRefused
from paceline.engine.line import PeerLost, WaitTimes
from paceline.engine.messages import Abort, Add, Snapshot, Stop, Update, Wake, decode_to_engine, encode
from paceline.engine.rank import CountsSteps, Rank

STATS_INTERVAL_S = 0.1
"""How old statistics may get while steps run; when the engine falls idle they are always sent."""
WAITING_POLL_MS = 1
"""How long to wait for news when there is work but nothing to compute (transfers under way)."""


class LinkClosed(Exception):
    """The parent process has gone; nobody waits for anything any more."""


@dataclass(slots=True)
class Heard:
    """What an inbox held: a ``request`` (even if it was aborted or refused since), a ``stop``, ``wakes`` of peers."""

    request: bool = False
    stop: bool = False
    wakes: list[int] = field(default_factory=list)


class Desk:
    """A rank's correspondence: requests and aborts go to its scheduler, outputs and statistics to its front.

    ``link``: a descriptor that becomes readable when the parent process has ended. ``partings``: sockets that become
    readable when a rank elsewhere has gone, and which it is. ``closed``: why requests are refused from now on, None
    while they are welcome.
    """

    def __init__(
        self,
        rank: Rank,
        inbox: zmq.Socket[bytes],
        outbox: zmq.Socket[bytes],
        link: int,
        *,
        number: int = 0,
        waits: WaitTimes | None = None,
        partings: Mapping[zmq.Socket[bytes], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.closed: str | None = None
        self._rank = rank
        self._number = number
        self._waits = waits
        self._inbox = inbox
        self._outbox = outbox
        self._poller = zmq.Poller()
        self._poller.register(inbox, zmq.POLLIN)
        self._poller.register(link, zmq.POLLIN)
        self._partings = partings or {}
        for parting in self._partings:
            self._poller.register(parting, zmq.POLLIN)
        self._link = link
        self._refused: list[StepOutput] = []
        self._idle_admissions = 0
        self._sent: Snapshot | None = None
        self._sent_at = 0.0

    def wait(self, wait_ms: int | None) -> None:
        """Return when there is something to read, or after ``wait_ms``.

        Raises:
            LinkClosed: the parent process has gone.
            PeerLost: a rank elsewhere has gone.
        """
        for where, _ in self._poller.poll(wait_ms):
            if where == self._link:
                raise LinkClosed
            if where is not self._inbox:
                assert isinstance(where, zmq.Socket)
                raise PeerLost(f"the connection to another rank, {self._partings[where]}, has ended")

    def read(self, wait_ms: int | None = 0) -> Heard:
        """Apply all messages that have come, after waiting for the first.

        Raises:
            LinkClosed, PeerLost: see `wait`.
        """
        self.wait(wait_ms)
        heard = Heard()
        while True:
            try:
                data = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return heard
            for message in decode_to_engine(data):
                if isinstance(message, Add):
                    heard.request = True
                    self._add(message)
                elif isinstance(message, Abort):
                    for request_id in message.request_ids:
                        self._rank.abort(request_id)
                elif isinstance(message, Wake):
                    heard.wakes.append(message.wave)
                elif isinstance(message, Stop):
                    heard.stop = True

    def _add(self, message: Add) -> None:
        try:
            if self.closed is not None:
                raise RequestRefused(self.closed)
            scheduler = self._rank.scheduler
            was_idle = not (scheduler.num_running or scheduler.num_waiting)
            self._rank.add(message.request())
            self._idle_admissions += was_idle
        except RequestRefused as error:
            self._refused.append(StepOutput(message.request_id, (), "error", error=str(error)))

    def report(self, plan: StepPlan, outputs: list[StepOutput], began: float) -> bool:
        """Tell the front about a step; False if there was nothing to tell."""
        if self._refused:
            outputs = outputs + self._refused
            self._refused = []
        told = bool(plan.rows or outputs)
        # In lock-step, dummies and waits are counted while there are no requests to report on.
        stats = self._stats(began) if told or self._waits is not None else None
        if told or stats is not None:
            started = tuple(new.request_id for new in plan.first)
            self._send(Update(outputs, started, began, plan.tokens, stats, self._number))
        return told

    def leftovers(self) -> None:
        """Before sleeping: refusals that no step carried, and statistics if they changed."""
        refused, self._refused = self._refused, []
        stats = self._snapshot()
        if refused or stats != self._sent:
            self._sent = stats
            self._send(Update(refused, stats=stats, rank=self._number))

    def _stats(self, now: float) -> Snapshot | None:
        if now - self._sent_at < STATS_INTERVAL_S:
            return None
        self._sent_at = now
        self._sent = snapshot = self._snapshot()
        return snapshot

    def _snapshot(self) -> Snapshot:
        scheduler, executor = self._rank.scheduler, self._rank.executor
        return Snapshot.of(
            scheduler.stats,
            scheduler.num_running,
            scheduler.num_waiting,
            scheduler.kv_usage,
            scheduler.num_quarantined_blocks,
            executor.steps if isinstance(executor, CountsSteps) else None,
            self._waits,
            self._idle_admissions,
        )

    def _send(self, update: Update) -> None:
        self._outbox.send(encode(update))


class EngineLoop:
    """Runs a rank on its own until a Stop comes or the parent's end of the link is closed."""

    def __init__(self, rank: Rank, desk: Desk) -> None:
        self._rank = rank
        self._desk = desk

    def run(self) -> None:
        """Step while there is work, sleep while there is none."""
        rank, desk = self._rank, self._desk
        desk.leftovers()
        wait_ms: int | None = None
        try:
            while not desk.read(wait_ms).stop:
                if rank.has_work:
                    wait_ms = 0 if self._step() else WAITING_POLL_MS
                if not rank.has_work:
                    desk.leftovers()
                    wait_ms = None
        except LinkClosed:
            return

    def _step(self) -> bool:
        """One step; False if it had nothing to compute and nothing to tell."""
        rank, desk = self._rank, self._desk
        began = desk.clock()
        plan = rank.begin(began)
        rank.launch_alone()
        return desk.report(plan, rank.finish(rank.collect(), desk.clock()), began)
