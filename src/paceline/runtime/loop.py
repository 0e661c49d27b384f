# SPDX-License-Identifier: Apache-2.0
"""The step loop of an engine process.

inbox:     read whole, without blocking, before each step; a step in flight is never disturbed
outbox:    one message per step
idle:      asleep in poll, without CPU, until a message comes or the parent process ends
"""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from paceline.core.plan import StepOutput
from paceline.core.scheduler import RequestRefused
from paceline.engine.messages import Abort, Add, Snapshot, Stop, Update, decode_to_engine, encode
from paceline.engine.rank import Rank

STATS_INTERVAL_S = 0.1
"""How old statistics may get while steps run; when the engine falls idle they are always sent."""
WAITING_POLL_MS = 1
"""How long to wait for news when there is work but nothing to compute (transfers under way)."""


class EngineLoop:
    """Runs a rank on its own until a Stop comes or the parent's end of ``link`` is closed.

    ``link``: a descriptor that becomes readable when the parent process has ended.
    """

    def __init__(
        self,
        rank: Rank,
        inbox: zmq.Socket[bytes],
        outbox: zmq.Socket[bytes],
        link: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank = rank
        self._inbox = inbox
        self._outbox = outbox
        self._clock = clock
        self._poller = zmq.Poller()
        self._poller.register(inbox, zmq.POLLIN)
        self._poller.register(link, zmq.POLLIN)
        self._link = link
        self._refused: list[StepOutput] = []
        self._sent: Snapshot | None = None
        self._sent_at = 0.0

    def run(self) -> None:
        """Step while there is work, sleep while there is none."""
        rank = self._rank
        self._send_leftovers()
        wait_ms: int | None = None
        while self._receive(wait_ms):
            if rank.has_work:
                wait_ms = 0 if self._step() else WAITING_POLL_MS
            if not rank.has_work:
                self._send_leftovers()
                wait_ms = None

    def _receive(self, wait_ms: int | None) -> bool:
        """Apply all messages that have come, after waiting for the first; False if the loop is to end."""
        ready = self._poller.poll(wait_ms)
        if not ready:
            return True
        if any(where == self._link for where, _ in ready):
            return False
        while True:
            try:
                data = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return True
            for message in decode_to_engine(data):
                if isinstance(message, Add):
                    self._add(message)
                elif isinstance(message, Abort):
                    for request_id in message.request_ids:
                        self._rank.abort(request_id)
                elif isinstance(message, Stop):
                    return False

    def _add(self, message: Add) -> None:
        try:
            self._rank.add(message.request())
        except RequestRefused as error:
            self._refused.append(StepOutput(message.request_id, (), "error", error=str(error)))

    def _step(self) -> bool:
        """One step; False if it had nothing to compute and nothing to tell."""
        rank = self._rank
        began = self._clock()
        plan = rank.begin(began)
        rank.launch()
        outputs = rank.finish(rank.collect(), self._clock())
        if self._refused:
            outputs = outputs + self._refused
            self._refused = []
        if plan.rows or outputs:
            started = tuple(new.request_id for new in plan.first)
            self._send(Update(outputs, started, began, plan.tokens, self._stats(began)))
            return True
        return False

    def _send_leftovers(self) -> None:
        """Before sleeping: refusals that no step carried, and statistics if they changed."""
        refused, self._refused = self._refused, []
        stats = self._snapshot()
        if refused or stats != self._sent:
            self._sent = stats
            self._send(Update(refused, stats=stats))

    def _stats(self, now: float) -> Snapshot | None:
        if now - self._sent_at < STATS_INTERVAL_S:
            return None
        self._sent_at = now
        self._sent = snapshot = self._snapshot()
        return snapshot

    def _snapshot(self) -> Snapshot:
        scheduler = self._rank.scheduler
        return Snapshot.of(scheduler.stats, scheduler.num_running, scheduler.num_waiting, scheduler.kv_usage)

    def _send(self, update: Update) -> None:
        self._outbox.send(encode(update))
