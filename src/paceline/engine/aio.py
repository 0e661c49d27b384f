# SPDX-License-Identifier: Apache-2.0
"""The asyncio front of an engine process: requests go out, what they gain comes back as async iterators.

Nothing here waits for the engine. Sending queues in the socket, which has no limit; receiving takes what is there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

import msgspec
import zmq

from paceline.core.plan import StepOutput
from paceline.engine.messages import Abort, Add, Dead, Snapshot, Stop, ToEngine, Update, decode_from_engine, encode

MESSAGES_PER_TURN = 32
"""How many messages are taken in one turn of the event loop before others get theirs."""


class EngineDead(RuntimeError):
    """The engine process has ended; the message says why."""


class Tracked:
    """A request, with the times that metrics need (monotonic seconds; None: not yet).

    ``ended``: when the engine said so, and ``reason``, what it said.
    """

    __slots__ = ("add", "ended", "first", "last", "num_output", "reason", "scheduled", "stream")

    def __init__(self, add: Add, stream: Stream) -> None:
        self.add = add
        self.stream = stream
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
    """An engine process as seen from an event loop.

    ``inbox`` is a PUSH and ``outbox`` a PULL socket, both without a high-water mark. ``dead``: why the process has
    ended, None while it lives. ``snapshot``: the statistics that came last.
    """

    def __init__(self, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes], observer: Observer | None = None) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._descriptor = int(outbox.getsockopt(zmq.FD))
        self._observer = observer
        self._requests: dict[str, Tracked] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.dead: str | None = None
        self.snapshot = Snapshot()

    @property
    def in_flight(self) -> int:
        """Requests that have not ended, waiting ones included."""
        return len(self._requests)

    def start(self) -> None:
        """Begin to receive, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._receive)
        self._loop.call_soon(self._receive)

    def close(self) -> None:
        """Tell the engine to end, and stop receiving; open streams end in an error."""
        if self._loop is not None:
            self._loop.remove_reader(self._descriptor)
            self._loop = None
        if self.dead is None:
            self._send(Stop())
        self.fail("the server is shutting down")

    def add(self, *requests: Add) -> Stream:
        """Queue requests; the stream carries the outputs of all of them.

        Raises:
            EngineDead: there is no engine to queue them in.
        """
        if self.dead is not None:
            raise EngineDead(self.dead)
        stream = Stream(self)
        for add in requests:
            tracked = self._requests[add.request_id] = Tracked(add, stream)
            stream.track(tracked)
        self._send(*requests)
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
        tracked = self._requests.pop(request_id, None)
        if tracked is not None:
            if self.dead is None:
                self._send(Abort((request_id,)))
            self._observe_end(tracked, reason)

    def decide(self, tracked: Tracked, reason: str) -> None:
        """The reader of a request that ended before has said why; called by its stream only."""
        self._observe_end(tracked, reason)

    def fail(self, reason: str) -> None:
        """The engine is gone: every open stream gets its terminal output, and new requests are refused."""
        if self.dead is not None:
            return
        self.dead = reason
        self.snapshot = msgspec.structs.replace(self.snapshot, running=0, waiting=0, kv_usage=0.0)
        requests, self._requests = self._requests, {}
        for request_id, tracked in requests.items():
            self._observe_end(tracked, "error")
            tracked.stream.push(StepOutput(request_id, (), "error", error=reason))

    def _send(self, *messages: ToEngine) -> None:
        self._inbox.send(encode(messages), zmq.NOBLOCK)

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
        message = decode_from_engine(data)
        if isinstance(message, Update):
            self._update(message)
        elif isinstance(message, Dead):
            self.fail(message.reason)

    def _update(self, update: Update) -> None:
        now = time.monotonic()
        if update.stats is not None:
            self.snapshot = update.stats
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

    def _output(self, tracked: Tracked, output: StepOutput, now: float) -> None:
        tokens = len(output.token_ids)
        if tokens:
            if self._observer is not None:
                self._observer.output(tracked, tokens, now)
            tracked.first = tracked.first or now
            tracked.last = now
            tracked.num_output += tokens
        if output.finish_reason is not None:
            del self._requests[output.request_id]
            tracked.ended, tracked.reason = now, output.finish_reason
            if not tracked.undecided(output.finish_reason):
                self._observe_end(tracked, output.finish_reason)
        tracked.stream.push(output)

    def _observe_end(self, tracked: Tracked, reason: str) -> None:
        if self._observer is not None:
            self._observer.end(tracked, reason, tracked.ended or time.monotonic())
