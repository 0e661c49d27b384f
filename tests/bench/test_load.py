# SPDX-License-Identifier: Apache-2.0
"""Who is sent when, and what of a delay is the client's: its limit, or its own lateness."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from paceline.bench.client import Client
from paceline.bench.load import Outgoing, Run, run_load
from tests.bench.scripted import ScriptedServer, Streamed, as_asked, scripted, text_chunk


def requests(arrivals: Sequence[float], tokens: int = 4) -> list[Outgoing]:
    """Requests whose prompts are their numbers."""
    bodies = [json.dumps({"prompt": str(i), "max_tokens": tokens}).encode() for i in range(len(arrivals))]
    return [Outgoing(at, body, prompt_len=9) for at, body in zip(arrivals, bodies, strict=True)]


def load(
    server: ScriptedServer, outgoing: Sequence[Outgoing], limit: int | None, seen: list[tuple[int, int]] | None = None
) -> Run:
    async def run() -> Run:
        async with asyncio.timeout(60), Client(server.base_url, "/v1/completions") as client:
            return await run_load(outgoing, client.send, limit, None if seen is None else lambda *n: seen.append(n))

    return asyncio.run(run())


@pytest.mark.parametrize("limit", [1, 3, 8])
def test_the_limit_is_reached_and_kept_and_the_order_is_that_of_arrival(limit: int) -> None:
    with scripted() as server:
        run = load(server, requests([0.0] * 24), limit)
    assert all(record.ok for record in run.records)
    assert server.most_in_flight == limit
    sent = [record.sent_s for record in run.records]
    assert sent == sorted(sent)
    if limit == 1:
        assert [body["prompt"] for body in server.bodies] == [str(i) for i in range(24)]


def test_waiting_for_the_limit_is_queue_time_not_dispatch_delay() -> None:
    with scripted() as server:
        run = load(server, requests([0.0] * 6, tokens=20), 1)
    for before, record in zip(run.records, run.records[1:], strict=False):
        # The one before had to end first, so the queue takes at least until then.
        assert record.sent_s >= before.chunk_s[-1]
        assert record.queue_s >= before.chunk_s[-1] - record.intended_s
        assert record.queue_s + record.dispatch_delay_s == pytest.approx(record.sent_s - record.intended_s)
    assert all(record.dispatch_delay_s >= 0.0 for record in run.records)


def test_without_a_limit_nobody_queues_and_all_lateness_is_the_client_s() -> None:
    with scripted() as server:
        run = load(server, requests([0.0] * 40), None)
    assert all(record.ok for record in run.records)
    assert [record.queue_s for record in run.records] == pytest.approx([0.0] * 40)
    assert all(record.dispatch_delay_s > 0.0 for record in run.records)


def test_nobody_is_sent_before_it_is_due() -> None:
    arrivals = [0.0, 0.011, 0.0112, 0.05, 0.0501, 0.09]
    with scripted() as server:
        run = load(server, requests(arrivals), None)
    start = run.records[0].intended_s
    assert [record.intended_s - start for record in run.records] == pytest.approx(arrivals)
    assert all(record.sent_s >= record.intended_s for record in run.records)
    assert run.duration_s >= arrivals[-1]


def test_a_place_is_free_again_after_a_failure() -> None:
    def script(asked: object) -> Streamed:
        return Streamed([text_chunk("x")], ending="reset")

    with scripted(ScriptedServer(script)) as server:
        run = load(server, requests([0.0] * 7), 2)
    assert len(run.records) == 7
    assert not any(record.ok for record in run.records)


def test_progress_counts_to_the_end() -> None:
    seen: list[tuple[int, int]] = []
    with scripted() as server:
        load(server, requests([0.0] * 5), 2, seen)
    assert seen == [(i, 5) for i in range(1, 6)]


def test_five_hundred_streams_at_once_lose_nothing() -> None:
    with scripted(ScriptedServer(as_asked)) as server:
        run = load(server, requests([0.0] * 500, tokens=8), None)
    assert {record.error for record in run.records} == {None}
    assert {(record.text, record.output_tokens) for record in run.records} == {("x" * 8, 8)}
    assert server.most_in_flight > 100
