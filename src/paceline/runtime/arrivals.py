# SPDX-License-Identifier: Apache-2.0
"""Which ranks the machines without a server run: the server of rank 0 gives them out as these nodes come.

    node      Arrival (4 ranks, from rank 8 on | wherever there is room)  ->  server, at the address of its outbox
    node      <-  Placed (first rank | refusal)                               server

A node starts its engines when it has been placed, so one that has no place disturbs nobody. Until all are ready the
server watches its connections to the nodes: one that ends before its ranks have joined ends the start.
"""

from __future__ import annotations

import time

import zmq

from paceline import __version__
from paceline.engine.line import named
from paceline.engine.messages import Arrival, Placed, encode
from paceline.runtime.engine_process import HEARTBEAT_MS, LAST_WORDS_MS, SILENCE_MS, push_or_pull

START_RANK = "data_parallel_start_rank"
SIZE_LOCAL = "data_parallel_size_local"


class PlaceRefused(ValueError):
    """There are no such ranks for a node; the message names the option and says why."""


class Roll:
    """The ranks of a group, each free or taken, in runs; the first run is the server's own."""

    def __init__(self, size: int, own: int) -> None:
        self.size = size
        self._runs = [range(own)] if own else []

    @property
    def missing(self) -> list[int]:
        """Ranks that nobody runs."""
        return [rank for rank in range(self.size) if not any(rank in run for run in self._runs)]

    def take(self, count: int, first: int | None) -> range:
        """``count`` ranks from ``first`` on, or the lowest run of free ones that is long enough.

        Raises:
            PlaceRefused: they are taken, or there is no such run.
        """
        if first is None:
            first = self._lowest(count)
        run = range(first, first + count)
        if not 0 <= first < run.stop <= self.size:
            raise PlaceRefused(f"{START_RANK}: {_named(run)} of {self.size} do not exist")
        for other in self._runs:
            if run.start < other.stop and other.start < run.stop:
                whose = "the server runs" if other.start == 0 else "another node runs"
                raise PlaceRefused(
                    f"{START_RANK}: asked for {_named(run)}, but {whose} {_named(other)}; leave it out to be given"
                    " free ones"
                )
        self._runs.append(run)
        return run

    def _lowest(self, count: int) -> int:
        missing = self.missing
        for rank in missing:
            if all(rank + k in missing for k in range(count)):
                return rank
        if not missing:
            raise PlaceRefused(f"{SIZE_LOCAL}: all {self.size} ranks are taken")
        raise PlaceRefused(
            f"{SIZE_LOCAL}: {count} in a row are not free, of {self.size} ranks only"
            f" {', '.join(map(str, missing))} {'is' if len(missing) == 1 else 'are'}"
        )


def _named(ranks: range) -> str:
    return named(ranks) if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


class Arrivals:
    """The server's side: places nodes, and notices those that go before their ranks are ready."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], size: int, own: int, *, in_step: bool, timeout_s: float
    ) -> None:
        """``own``: ranks that the server runs itself. ``in_step``: whether ranks of the group keep step.

        ``timeout_s``: within which all nodes must come.
        """
        self._context = context
        self._roll = Roll(size, own)
        self._in_step = in_step
        self._timeout_s = timeout_s
        self._ends = time.monotonic() + timeout_s
        self._watched: list[tuple[range, str, zmq.Socket[bytes], zmq.Socket[bytes]]] = []
        self._complete = False

    def admit(self, node: Arrival) -> None:
        """Place a node, or tell it why it cannot be."""
        answer = push_or_pull(self._context, zmq.PUSH)
        monitor: zmq.Socket[bytes] | None = None
        if not self._complete:
            answer.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            answer.set(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
            # A retry: nobody listens there any more, or no way leads there.
            monitor = answer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
        answer.connect(node.inbox)
        try:
            run = self._place(node)
        except PlaceRefused as refused:
            answer.send(encode(Placed(refusal=str(refused))))
            if monitor is not None:
                answer.disable_monitor()
            answer.close(linger=LAST_WORDS_MS)
            return
        answer.send(encode(Placed(first=run.start)))
        assert monitor is not None, "a complete group has no place"
        self._watched.append((run, node.inbox, answer, monitor))

    def _place(self, node: Arrival) -> range:
        if node.version != __version__:
            raise PlaceRefused(f"the server runs paceline {__version__}, this node {node.version}; they must be equal")
        if node.size != self._roll.size:
            raise PlaceRefused(f"data_parallel_size: {self._roll.size} at the server, {node.size} here")
        if node.in_step != self._in_step:
            one, other = ("the server", "this node") if self._in_step else ("this node", "the server")
            raise PlaceRefused(f"enable_expert_parallel: given to {one}, but not to {other}")
        return self._roll.take(node.ranks, node.first)

    def nobody_is(self, rank: int) -> bool:
        """Whether nobody has been given ``rank``: what it says was meant for an earlier server at this address."""
        return rank in self._roll.missing

    def problem(self) -> str | None:
        """Why the group will not become complete, if that is certain."""
        for run, inbox, _, monitor in self._watched:
            if monitor.poll(0):
                return f"the node at {inbox} that runs {_named(run)} has gone, or cannot be reached"
        missing = self._roll.missing
        if missing and time.monotonic() > self._ends:
            return (
                f"data_parallel_size: {named(missing)} of {self._roll.size} did not come within {self._timeout_s:g} s;"
                " start nodes with --headless for them"
            )
        return None

    def complete(self) -> None:
        """All ranks are ready: from now on others watch them, and whoever comes is refused."""
        self._complete = True
        for _, _, answer, _ in self._watched:
            answer.disable_monitor()
            answer.close(linger=0)
        self._watched.clear()
