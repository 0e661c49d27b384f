# SPDX-License-Identifier: Apache-2.0
"""Sends requests when they are due, within a concurrency limit, and keeps their records."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from paceline.bench.client import clock
from paceline.core.results import RequestRecord

Send = Callable[[bytes, RequestRecord], Awaitable[None]]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request ready to be sent. ``arrival_s``: when, from the start; ``prompt_len``: tokens, 0 if unknown."""

    arrival_s: float
    body: bytes
    prompt_len: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """What came of it: records in the order of the requests; seconds passed, and those of this process's CPU."""

    records: list[RequestRecord]
    duration_s: float
    client_cpu_s: float


async def run_load(
    requests: Sequence[Outgoing], send: Send, max_concurrency: int | None, progress: Progress | None = None
) -> Run:
    """Send ``requests`` (in order of arrival) at their times, at most ``max_concurrency`` in flight, to their ends.

    The order is kept: one that waits for the limit holds up those behind it. A request's dispatch delay counts from
    when it was due and, if the limit held it, a place was free, until it was handed to the connection.
    """
    # What exists by now lives to the end; scanning it would be a pause in the middle of a measurement.
    gc.collect()
    gc.freeze()
    try:
        return await _run(requests, send, max_concurrency, progress)
    finally:
        gc.unfreeze()


async def _run(requests: Sequence[Outgoing], send: Send, max_concurrency: int | None, progress: Progress | None) -> Run:
    # When each free place became free.
    places: asyncio.Queue[float] = asyncio.Queue()
    for _ in range(len(requests) if max_concurrency is None else max_concurrency):
        places.put_nowait(-math.inf)
    records: list[RequestRecord] = []
    ended = 0

    async def one(request: Outgoing, record: RequestRecord, allowed_s: float) -> None:
        nonlocal ended
        await send(request.body, record)
        record.dispatch_delay_s = record.sent_s - allowed_s
        places.put_nowait(clock())
        ended += 1
        if progress is not None:
            progress(ended, len(requests))

    cpu, start = time.process_time(), clock()
    async with asyncio.TaskGroup() as tasks:
        for request in requests:
            due = start + request.arrival_s
            while (early := due - clock()) > 0:  # a timer may fire up to a millisecond early
                await asyncio.sleep(early)
            allowed = max(due, await places.get())
            record = RequestRecord(prompt_len=request.prompt_len, intended_s=due, sent_s=due)
            records.append(record)
            tasks.create_task(one(request, record, allowed))
    return Run(records, clock() - start, time.process_time() - cpu)
