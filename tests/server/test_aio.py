# SPDX-License-Identifier: Apache-2.0
"""The asyncio front of an engine process, without HTTP around it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from paceline.core.plan import StepOutput
from paceline.core.request import SamplingParams
from paceline.engine.aio import AsyncEngine, EngineDead
from paceline.engine.messages import Add
from paceline.runtime.engine_group import EngineFailed, EngineGroup, EngineRefused
from tests.server.fake import END, FACTORY
from tests.server.harness import DEADLINE_S, environment


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child process must find the fake engine."""
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])


@asynccontextmanager
async def engine_with(**options: Any) -> AsyncIterator[AsyncEngine]:
    process = EngineGroup(FACTORY, options)
    try:
        process.wait_ready()
        engine = AsyncEngine(process.inboxes, process.outbox)
        engine.start()
        async with asyncio.timeout(DEADLINE_S):
            yield engine
        engine.close()
    finally:
        process.kill()


def request(name: str, prompt: Sequence[int], **params: Any) -> Add:
    return Add(name, list(prompt), SamplingParams(**params), time.monotonic(), END)


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def outputs_of(engine: AsyncEngine, *adds: Add) -> list[StepOutput]:
    with engine.add(*adds) as stream:
        return [output async for output in stream]


def test_outputs_of_several_requests() -> None:
    async def run() -> list[StepOutput]:
        async with engine_with() as engine:
            return await outputs_of(engine, request("a", b"abc", max_tokens=7), request("b", [*b"xy", END]))

    outputs = asyncio.run(run())
    for name, ids, reason in (("a", list(b"abcabca"), "length"), ("b", [*b"xy", END], "stop")):
        own = [output for output in outputs if output.request_id == name]
        assert [token for output in own for token in output.token_ids] == ids
        assert [output.finish_reason for output in own] == [*[None] * (len(own) - 1), reason]


def test_what_piles_up_is_merged() -> None:
    async def run() -> tuple[list[StepOutput], int]:
        async with engine_with() as engine:
            with engine.add(request("a", b"abc", max_tokens=300), request("b", b"x", max_tokens=200)) as stream:
                await until(lambda: not engine.in_flight)
                return [output async for output in stream], engine.in_flight

    outputs, _ = asyncio.run(run())
    assert sorted((output.request_id, len(output.token_ids)) for output in outputs) == [("a", 300), ("b", 200)]
    assert all(output.finish_reason == "length" for output in outputs)


def test_abort_ends_the_stream_and_frees() -> None:
    async def run() -> list[StepOutput]:
        async with engine_with(step_s=0.01) as engine:
            with engine.add(request("a", b"abc", max_tokens=2000)) as stream:
                await until(lambda: engine.snapshots[0].running == 1)
                assert engine.snapshots[0].kv_usage > 0
                engine.abort("a", "unknown")
                outputs = [output async for output in stream]
            await until(lambda: engine.snapshots[0].running == 0 and engine.snapshots[0].kv_usage == 0)
            return outputs

    assert asyncio.run(run())[-1].finish_reason == "abort"


def test_leaving_the_block_aborts() -> None:
    async def run() -> None:
        async with engine_with(step_s=0.01) as engine:
            with engine.add(request("a", b"abc", max_tokens=2000)) as stream:
                assert (await anext(stream)).token_ids
            assert engine.in_flight == 0
            await until(lambda: engine.snapshots[0].running == 0 and engine.snapshots[0].kv_usage == 0)

    asyncio.run(run())


def test_request_that_the_scheduler_refuses_ends_in_an_error() -> None:
    async def run() -> list[StepOutput]:
        async with engine_with(max_model_len=64) as engine:
            return await outputs_of(engine, request("long", b"a" * 64), request("a", b"a", max_tokens=2))

    outputs = {output.request_id: output for output in asyncio.run(run())}
    assert outputs["long"].finish_reason == "error"
    assert "max_model_len" in (outputs["long"].error or "")
    assert outputs["a"].finish_reason == "length"


def test_closing_ends_open_streams_and_refuses_new_requests() -> None:
    async def run() -> list[StepOutput]:
        async with engine_with(step_s=0.01) as engine:
            stream = engine.add(request("a", b"abc", max_tokens=2000))
            await anext(stream)
            engine.close()
            with pytest.raises(EngineDead):
                engine.add(request("b", b"abc"))
            return [output async for output in stream]

    assert asyncio.run(run())[-1].finish_reason == "error"


def test_engine_that_cannot_be_built() -> None:
    process = EngineGroup(FACTORY, {"refuse": "depth: there is no such option"})
    with pytest.raises(EngineRefused, match="depth: there is no such option"):
        process.wait_ready()
    process.kill()


def test_engine_that_dies_before_it_is_ready() -> None:
    broken = EngineGroup("os:abort", {})
    with pytest.raises(EngineFailed, match="TypeError"):
        broken.wait_ready()
    broken.kill()
    killed = EngineGroup(FACTORY, {})
    os.kill(killed.pids[0], signal.SIGKILL)
    with pytest.raises(EngineFailed, match="killed by signal 9"):
        killed.wait_ready()
    killed.kill()
