# SPDX-License-Identifier: Apache-2.0
"""The asyncio front of engine processes: requests go out, what they gain comes back as async iterators.

Nothing here waits for an engine. Sending queues in the socket, which has no limit; receiving takes what is there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

import msgspec
import zmq

from paceline.core.balance import RankBalancer, RankLoad
from paceline.core.plan import StepOutput
from paceline.engine.messages import (
    Abort,
    Add,
    Arrival,
    Beat,
    Dead,
    Snapshot,
    Stop,
    ToEngine,
    Update,
    decode_from_engine,
    encode,
)

MESSAGES_PER_TURN = 32
"""How many messages are taken in one turn of the event loop before others get theirs."""
SNAPSHOT_INTERVAL_S = 0.1
"""How often the balancer hears of the ranks' queues."""
BEAT_DEADLINE_S = 2.5
"""A rank whose process has given no sign of life for so long is frozen; five are sent in that time."""
BEAT_CHECK_S = 0.25
LAST_WORDS_S = 0.2
"""How long to wait for the reasons of the other ranks when one has gone: the first heard may be the effect."""


class EngineDead(RuntimeError):
    """The engine process has ended; the message says why."""


class Tracked:
    """A request on ``rank``, with the times that metrics need (monotonic seconds; None: not yet).

    ``ended``: when the engine said so, and ``reason``, what it said.
    """

    __slots__ = ("add", "ended", "first", "last", "num_output", "rank", "reason", "scheduled", "stream")

    def __init__(self, add: Add, stream: Stream, rank: int = 0) -> None:
        self.add = add
        self.stream = stream
        self.rank = rank
        self.scheduled: float | None = None
        self.first: float | None = None
        self.last: float | None = None
        self.num_output = 0
        self.ended: float | None = None
        self.reason = "abort"

    def undecided(self, reason: str) -> bool:
        """Whether a stop string, for which the engine does not look, may have ended the request before ``reason``."""
        return bool(self.add.params.stop) and reason in ("stop", "length")


class Observer(Protocol):
    """Sees what passes, for metrics. Times are monotonic seconds."""

    def step(self, update: Update) -> None: ...

    def output(self, request: Tracked, tokens: int, now: float) -> None:
        """Called before ``first``, ``last`` and ``num_output`` take ``tokens`` in."""
        ...

    def end(self, request: Tracked, reason: str, now: float) -> None: ...


def merge(outputs: Sequence[StepOutput]) -> StepOutput:
    """One output that says what several of one request, in order, said."""
    if len(outputs) == 1:
        return outputs[0]
    changes: dict[str, object] = {"token_ids": tuple(t for output in outputs for t in output.token_ids)}
    if outputs[0].logprobs is not None:
        changes["logprobs"] = tuple(p for output in outputs for p in output.logprobs or ())
    return msgspec.structs.replace(outputs[-1], **changes)


class Stream:
    """The outputs of one or several requests, as they come; iterate until all have ended.

    Outputs that pile up while nobody reads are merged, one per request, and never dropped. As a context manager it
    aborts on exit what has not ended.
    """

    __slots__ = ("_engine", "_open", "_pending", "_undecided", "_waiter")

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._open: dict[str, Tracked] = {}
        # Ended in the engine; the reader has yet to say why.
        self._undecided: dict[str, Tracked] = {}
        self._pending: dict[str, list[StepOutput]] = {}
        self._waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> StepOutput:
        while not self._pending:
            if not self._open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        request_id = next(iter(self._pending))
        return merge(self._pending.pop(request_id))

    def end(self, request_id: str, reason: str) -> None:
        """A request is over for its reader, for ``reason``: no more output comes, and the engine stops it if it runs.

        Readers of requests with stop strings call this also when the engine has said the same, since it does not
        look for those strings.
        """
        if self._open.pop(request_id, None) is not None:
            self._engine.end(request_id, reason)
        elif (tracked := self._undecided.pop(request_id, None)) is not None:
            self._engine.decide(tracked, reason)
        self._pending.pop(request_id, None)

    def close(self) -> None:
        """Abort whatever has not ended."""
        for request_id in list(self._open):
            self.end(request_id, "abort")
        for request_id, tracked in list(self._undecided.items()):
            self.end(request_id, tracked.reason)

    def push(self, output: StepOutput) -> None:
        """Queue an output; called by the engine front only."""
        request_id = output.request_id
        if output.finish_reason is not None:
            tracked = self._open.pop(request_id, None)
            if tracked is not None and tracked.undecided(output.finish_reason):
                self._undecided[request_id] = tracked
        self._pending.setdefault(request_id, []).append(output)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def track(self, tracked: Tracked) -> None:
        """Expect outputs of a request; called by the engine front only."""
        self._open[tracked.add.request_id] = tracked


class AsyncEngine:
    """One engine, or several data-parallel ranks, in processes of their own, as seen from an event loop.

    ``inboxes`` (by rank) are PUSH sockets and ``outbox`` a PULL socket, all without a high-water mark. ``dead``: why
    there is no engine any more, None while there is one; it is gone as a whole when any rank is. ``failed``: it went
    by itself; ``on_failure`` was called. ``on_arrival``: answers late nodes. ``snapshots``: last statistics by rank.
    """

    def __init__(
        self,
        inboxes: Sequence[zmq.Socket[bytes]],
        outbox: zmq.Socket[bytes],
        observer: Observer | None = None,
        *,
        size: int | None = None,
        first_rank: int = 0,
    ) -> None:
        """``size``: of the group that the engines are ranks of, and ``first_rank`` which of it the first is, if others
        of the group have fronts of their own."""
        self._size = len(inboxes) if size is None else size
        self._first_rank = first_rank
        self._inboxes = list(inboxes)
        self._outbox = outbox
        self._descriptor = int(outbox.getsockopt(zmq.FD))
        self._observer = observer
        self._requests: dict[str, Tracked] = {}
        self._balancer = RankBalancer(len(inboxes))
        self._news_for_balancer = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beats = [0.0] * len(inboxes)
        self._checked = 0.0
        self._lost: dict[int, Dead] = {}
        self.dead: str | None = None
        self.failed = False
        self.on_failure: Callable[[str], None] = lambda reason: None
        self.on_arrival: Callable[[Arrival], None] = lambda node: None
        self.snapshots = [Snapshot() for _ in inboxes]

    @property
    def num_ranks(self) -> int:
        return len(self._inboxes)

    @property
    def in_flight(self) -> int:
        """Requests that have not ended, waiting ones included."""
        return len(self._requests)

    def start(self) -> None:
        """Begin to receive, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._receive)
        self._loop.call_soon(self._receive)
        if self._size > 1:
            self._beats = [time.monotonic()] * self.num_ranks
            self._check_beats()

    def close(self) -> None:
        """Tell the engine to end, and stop receiving; open streams end in an error."""
        if self._loop is not None:
            self._loop.remove_reader(self._descriptor)
            self._loop = None
        self.fail("the server is shutting down")
        if not self.failed:
            for rank in range(self.num_ranks):
                self._send(rank, Stop())

    def add(self, *requests: Add, rank: int | None = None) -> Stream:
        """Queue requests, on ``rank`` if given; the stream carries the outputs of all of them.

        Raises:
            EngineDead: there is no engine to queue them in.
            ConfigError: there is no such rank.
        """
        if self.dead is not None:
            raise EngineDead(self.dead)
        stream = Stream(self)
        chosen: dict[int, list[Add]] = {}
        for add in requests:
            pick = self._balancer.pick(rank)
            chosen.setdefault(pick, []).append(add)
            tracked = self._requests[add.request_id] = Tracked(add, stream, pick)
            stream.track(tracked)
        for pick, adds in chosen.items():
            self._send(pick, *adds)
        return stream

    def abort(self, *request_ids: str) -> None:
        """End requests wherever they are; their streams get a last output with reason ``abort``."""
        for request_id in request_ids:
            if request_id in self._requests:
                stream = self._requests[request_id].stream
                self.end(request_id, "abort")
                stream.push(StepOutput(request_id, (), "abort"))

    def end(self, request_id: str, reason: str) -> None:
        """End a request of which nobody wants to hear more, for ``reason`` (a stop string; the reader has left)."""
        if request_id in self._requests:
            tracked = self._forget(request_id)
            if self.dead is None:
                self._send(tracked.rank, Abort((request_id,)))
            self._observe_end(tracked, reason)

    def decide(self, tracked: Tracked, reason: str) -> None:
        """The reader of a request that ended before has said why; called by its stream only."""
        self._observe_end(tracked, reason)

    def fail(self, reason: str) -> None:
        """The engine is gone: every open stream gets its terminal output, and new requests are refused."""
        if self.dead is not None:
            return
        self.dead = reason
        self.snapshots = [msgspec.structs.replace(s, running=0, waiting=0, kv_usage=0.0) for s in self.snapshots]
        for request_id in list(self._requests):
            tracked = self._forget(request_id)
            if not self.failed:
                # Ranks in step end when none of them has work any more.
                self._send(tracked.rank, Abort((request_id,)))
            self._observe_end(tracked, "error")
            tracked.stream.push(StepOutput(request_id, (), "error", error=reason))

    def lose(self, dead: Dead) -> None:
        """A rank has gone, or is about to; the engine goes with it."""
        if self.dead is not None or self._loop is None:
            return
        first = not self._lost
        # What an engine said itself says more than how its process ended.
        self._lost.setdefault(dead.rank, dead)
        if self._size == 1:
            self._fail_by_itself()
        elif first:
            self._loop.call_later(LAST_WORDS_S, self._fail_by_itself)

    def _fail_by_itself(self) -> None:
        """The reason is that of the rank that went first, not of those that missed it."""
        if self.dead is not None:
            return
        causes = [dead for dead in self._lost.values() if not dead.peer_lost] or list(self._lost.values())
        rank = f"rank {self._first_rank + causes[0].rank}: " if self._size > 1 else ""
        self.failed = True
        self.fail(rank + causes[0].reason)
        assert self.dead is not None
        self.on_failure(self.dead)

    def _forget(self, request_id: str) -> Tracked:
        tracked = self._requests.pop(request_id)
        self._balancer.done(tracked.rank)
        return tracked

    def _send(self, rank: int, *messages: ToEngine) -> None:
        self._inboxes[rank].send(encode(messages), zmq.NOBLOCK)

    def _receive(self) -> None:
        """Take what has come. The socket's descriptor signals changes only, so it is read until it is empty."""
        if self._loop is None:
            return
        for _ in range(MESSAGES_PER_TURN):
            try:
                data = self._outbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._apply(data)
        self._loop.call_soon(self._receive)

    def _apply(self, data: bytes) -> None:
        try:
            message = decode_from_engine(data)
        except msgspec.DecodeError:
            return  # of a node of another version, which comes too late in any case
        if isinstance(message, Update):
            self._update(message)
        elif isinstance(message, Beat):
            self._beats[message.rank] = time.monotonic()
        elif isinstance(message, Dead):
            self.lose(message)
        elif isinstance(message, Arrival):
            self.on_arrival(message)

    def _check_beats(self) -> None:
        """Find frozen ranks: nobody else would, while all sleep."""
        if self._loop is None or self.dead is not None:
            return
        now = time.monotonic()
        if now - self._checked > 2 * BEAT_CHECK_S:
            # It is this loop that did not run; what was sent meanwhile is still to be read.
            self._beats = [now] * self.num_ranks
        self._checked = now
        for rank, beat in enumerate(self._beats):
            if now - beat > BEAT_DEADLINE_S:
                self.lose(Dead(f"the engine process is frozen (no sign of life for {BEAT_DEADLINE_S:g} s)", rank=rank))
        self._loop.call_later(BEAT_CHECK_S, self._check_beats)

    def _update(self, update: Update) -> None:
        now = time.monotonic()
        if update.stats is not None:
            self.snapshots[update.rank] = update.stats
            if self._loop is not None and self.num_ranks > 1 and not self._news_for_balancer:
                self._news_for_balancer = True
                self._loop.call_later(SNAPSHOT_INTERVAL_S, self._tell_balancer)
        if self._observer is not None:
            self._observer.step(update)
        for request_id in update.started:
            if request_id in self._requests:
                self._requests[request_id].scheduled = update.began
        for output in update.outputs:
            # None: it was aborted, or a stop string ended it, while this output was under way.
            tracked = self._requests.get(output.request_id)
            if tracked is not None:
                self._output(tracked, output, now)

    def _tell_balancer(self) -> None:
        self._news_for_balancer = False
        self._balancer.snapshot([RankLoad(s.waiting, s.running, s.kv_usage) for s in self.snapshots])

    def _output(self, tracked: Tracked, output: StepOutput, now: float) -> None:
        tokens = len(output.token_ids)
        if tokens:
            if self._observer is not None:
                self._observer.output(tracked, tokens, now)
            tracked.first = tracked.first or now
            tracked.last = now
            tracked.num_output += tokens
        if output.finish_reason is not None:
            self._forget(output.request_id)
            tracked.ended, tracked.reason = now, output.finish_reason
            if not tracked.undecided(output.finish_reason):
                self._observe_end(tracked, output.finish_reason)
        tracked.stream.push(output)

    def _observe_end(self, tracked: Tracked, reason: str) -> None:
        if self._observer is not None:
            self._observer.end(tracked, reason, tracked.ended or time.monotonic())
