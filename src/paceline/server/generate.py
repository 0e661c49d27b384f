# SPDX-License-Identifier: Apache-2.0
"""Runs jobs: answers in one piece, or as server-sent events; a client that leaves ends its job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
from msgspec import UNSET
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.engine.aio import EngineDead, Stream
from paceline.server.choice import Choice
from paceline.server.errors import RETRY_LATER_S, ApiError, unavailable
from paceline.server.formats import Format
from paceline.server.jobs import Job
from paceline.server.replies import usage

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def event(body: msgspec.Struct) -> bytes:
    """A server-sent event."""
    return b"data: " + _encode(body) + b"\n\n"


def begin(job: Job) -> Stream:
    """Let a job in and queue its requests.

    Raises:
        ApiError: 503: there is no room, or no engine.
    """
    job.state.admit(len(job.adds))
    job.state.metrics.asked(job.request.n)
    try:
        return job.state.engine.add(*job.adds, rank=job.rank)
    except EngineDead as error:
        raise unavailable(f"the engine is not running: {error}", RETRY_LATER_S) from None


async def updates(job: Job, stream: Stream) -> AsyncIterator[Choice]:
    """Each time a choice has gained something, that choice.

    Raises:
        ApiError: 500: the engine could not go on with one of them.
    """
    async for output in stream:
        choice = job.by_id[output.request_id]
        choice.take(output)
        if choice.finish_reason is not None:
            stream.end(output.request_id, choice.finish_reason)
        if choice.finish_reason == "error":
            raise ApiError(500, choice.error or "the engine could not complete this request")
        yield choice


async def whole(job: Job, form: Format, receive: Receive) -> Response:
    """Run a job to its end and answer in one piece; a client that leaves before gets nothing.

    Raises:
        ApiError: 503 or 500, as `begin` and `updates` say.
    """
    with begin(job) as stream, job.state.busy():

        async def run() -> None:
            async for _ in updates(job, stream):
                pass

        work = asyncio.create_task(run())
        watch = asyncio.create_task(gone(receive))
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                # Nobody reads this; 499 is what proxies write for a client that left.
                return Response(status_code=499)
            work.result()
        finally:
            work.cancel()
            watch.cancel()
        return Response(_encode(form.whole()), media_type="application/json")


async def gone(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Answers a job chunk by chunk.

    A slow reader is waited for, here and nowhere else: what its choices gain meanwhile is merged into the next chunk.
    """

    def __init__(self, job: Job, form: Format, stream: Stream) -> None:
        self._job = job
        self._form = form
        self._stream = stream
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        # Unknown in advance.
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._stream, self._job.state.busy():
            work = asyncio.create_task(self._run(send))
            watch = asyncio.create_task(gone(receive))
            try:
                await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()
            finally:
                work.cancel()
                watch.cancel()

    async def _run(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for events in self._events():
                await send({"type": "http.response.body", "body": events, "more_body": True})
            last = DONE
        except ApiError as error:
            # The status has been sent; the error becomes the last event before the end.
            last = event(error.body) + DONE
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        job, form = self._job, self._form
        options = job.request.stream_options
        continuous = options is not None and options.continuous_usage_stats
        interval = max(job.request.stream_interval, job.state.stream_interval)
        unfinished = len(job.choices)
        async for choice in updates(job, self._stream):
            ended = choice.finish_reason is not None
            if choice.started and not ended and choice.num_untaken < interval:
                continue
            unfinished -= ended
            chunks = [] if choice.started else form.opening(choice)
            counts = usage(len(job.prompt_of(choice).ids), len(choice.token_ids)) if continuous else UNSET
            last = ended and not unfinished and not (options and options.include_usage)
            chunks.append(form.chunk(choice, choice.delta(), counts, last))
            choice.started = True
            yield b"".join(map(event, chunks))
        if options is not None and options.include_usage:
            yield event(form.closing(usage(job.num_prompt_tokens, job.num_output_tokens)))
