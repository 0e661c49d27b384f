# SPDX-License-Identifier: Apache-2.0
"""Servers with several ranks, as processes: who gets which request, and what happens when a rank goes."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.fake import RAISE
from tests.server.harness import Server, alive, events, fake_server, wait_until

COMPLETIONS = "/v1/completions"
LOCKSTEP = {"lockstep": True, "timeout_s": 60.0}
FAILURE_DEADLINE_S = 5.0
"""From a rank's end to the server's."""


@pytest.fixture(scope="module")
def line() -> Iterator[Server]:
    """Two ranks in step."""
    with fake_server({"data_parallel": LOCKSTEP, "num_drafts": 3}, data_parallel_size=2) as server:
        yield server


@pytest.fixture(scope="module")
def replicas() -> Iterator[Server]:
    """Two ranks that share nothing."""
    with fake_server({"step_s": 0.01}, data_parallel_size=2) as server:
        yield server


def open_stream(server: Server, rank: int | None = None, **fields: Any) -> http.client.HTTPResponse:
    """A stream of which the first chunk has been read."""
    connection = server.connection()
    body = {"prompt": "abc", "max_tokens": 2000, "stream": True, **fields}
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    connection.request("POST", COMPLETIONS, json.dumps(body).encode(), headers)
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.readline().startswith(b"data: ")
    assert answer.readline() == b"\n"
    return answer


def ended(server: Server, reason: str) -> list[float]:
    """Requests that ended for ``reason``, by rank."""
    return [
        server.metric("vllm:request_success_total", finished_reason=reason, engine=str(rank))
        for rank in range(len(server.children()))
    ]


@pytest.mark.parametrize("kind", ["line", "replicas"])
def test_L6_requests_are_shared_out_evenly(kind: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(kind)
    before = ended(server, "length")
    connections = []
    for i in range(10):
        connection = server.connection()
        body = {"prompt": f"request {i}", "max_tokens": 200}
        connection.request("POST", COMPLETIONS, json.dumps(body).encode())
        connections.append(connection)
    for i, connection in enumerate(connections):
        text = json.loads(connection.getresponse().read())["choices"][0]["text"]
        assert text == (f"request {i}" * 30)[:200]
    assert [a - b for a, b in zip(ended(server, "length"), before, strict=True)] == [5, 5]


@pytest.mark.parametrize("kind", ["line", "replicas"])
def test_a_rank_can_be_asked_for(kind: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(kind)
    for rank in (0, 1, 1):
        before = ended(server, "length")
        fields = {"prompt": ["ab", "cd"], "max_tokens": 3, "n": 2}
        reply = server.post(COMPLETIONS, fields, {"X-data-parallel-rank": str(rank)})
        assert reply.status == 200
        assert [a - b for a, b in zip(ended(server, "length"), before, strict=True)][rank] == 4


@pytest.mark.parametrize("rank", ["2", "-1", "one", "", "1.0", "99999999999999999999"])
def test_a_rank_that_does_not_exist_is_refused(line: Server, rank: str) -> None:
    error = line.post(COMPLETIONS, {"prompt": "a"}, {"X-data-parallel-rank": rank}).error
    assert error["param"] == "X-Data-Parallel-Rank"
    assert "a rank from 0 to 1" in error["message"]


def test_an_idle_rank_runs_dummies_and_the_barrier_is_measured(line: Server) -> None:
    def counts(rank: int) -> list[float]:
        steps = [line.metric("paceline:steps_total", engine=str(rank), mode=mode) for mode in ("NONE", "FULL")]
        dummies = [line.metric("paceline:dummy_steps_total", engine=str(rank), mode=mode) for mode in ("NONE", "FULL")]
        return [*steps, *dummies]

    wait_until(lambda: line.metric("vllm:num_requests_running", engine="1") == 0, "rank 1 to be idle")
    before = [counts(rank) for rank in range(2)]
    waits = line.metric("paceline:barrier_wait_seconds_count", engine="1")
    assert line.post(COMPLETIONS, {"prompt": "a", "max_tokens": 60}, {"X-data-parallel-rank": "0"}).status == 200

    def gained(rank: int) -> list[float]:
        return [a - b for a, b in zip(counts(rank), before[rank], strict=True)]

    wait_until(lambda: sum(gained(0)[:2]) > 0 and gained(1) == [0, 0, *gained(0)[:2]], "a dummy for each step")
    assert gained(0)[2:] == [0, 0]
    assert line.metric("paceline:barrier_wait_seconds_count", engine="1") - waits > sum(gained(0))


def test_L7_replicas_do_not_coordinate(replicas: Server) -> None:
    before = replicas.metric("paceline:steps_total", engine="0", mode="NONE")
    assert replicas.post(COMPLETIONS, {"prompt": "a", "max_tokens": 30}, {"X-data-parallel-rank": "1"}).status == 200
    assert replicas.metric("paceline:steps_total", engine="0", mode="NONE") == before
    assert replicas.metric("paceline:dummy_steps_total", engine="0", mode="NONE") == 0
    assert "paceline:barrier_wait_seconds_count" not in replicas.get("/metrics").text
    for pid in replicas.children():
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text(), "no collective, nor what it would need"


def test_a_replica_that_dies_ends_the_server_too() -> None:
    """A rank is never missing silently, whether others need it or not."""
    with fake_server({"step_s": 0.02}, data_parallel_size=2) as server:
        check_failure(server, signal.SIGKILL, asleep=False)


@pytest.mark.parametrize("asleep", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_L10_a_rank_that_dies_or_freezes_ends_the_group(number: signal.Signals, asleep: bool) -> None:
    with fake_server({"step_s": 0.02, "data_parallel": LOCKSTEP}, data_parallel_size=2) as server:
        check_failure(server, number, asleep=asleep)


def check_failure(server: Server, number: signal.Signals, *, asleep: bool) -> None:
    """A signal to rank 1: every client hears of it, /health goes off, and the server ends with a failure, in time."""
    ranks = server.children()
    streams = [] if asleep else [open_stream(server, rank) for rank in (0, 1)]
    began = time.monotonic()
    os.kill(ranks[1], number)
    words = "killed by signal 9" if number == signal.SIGKILL else "frozen"
    for answer in streams:
        [*_, last] = events(answer.read())
        assert last["error"]["code"] == 500
        assert "rank 1" in last["error"]["message"]
        assert words in last["error"]["message"]
    wait_until(lambda: server.get("/health").status == 503, "readiness to go off")
    refused = server.post(COMPLETIONS, {"prompt": "a"})
    assert refused.status == 503
    assert words in refused.error["message"]
    assert server.wait() == 1
    assert time.monotonic() - began < FAILURE_DEADLINE_S
    assert "rank 1" in "".join(server.log)


def test_a_rank_that_fails_in_a_step_gives_the_reason_for_all() -> None:
    with fake_server({"step_s": 0.02, "data_parallel": LOCKSTEP}, data_parallel_size=2) as server:
        bystander = open_stream(server, 0)
        reply = server.post(COMPLETIONS, {"prompt": [97, RAISE], "max_tokens": 5}, {"X-data-parallel-rank": "1"})
        assert reply.status == 500
        assert "rank 1" in reply.error["message"]
        assert "the script says so" in reply.error["message"]
        assert "the script says so" in events(bystander.read())[-1]["error"]["message"]
        assert server.wait() == 1


def test_sigterm_lets_streams_of_all_ranks_finish() -> None:
    with fake_server({"step_s": 0.01, "data_parallel": LOCKSTEP}, data_parallel_size=2) as server:
        streams = [open_stream(server, rank, max_tokens=60 + 60 * rank) for rank in (0, 1)]
        server.terminate()
        wait_until(lambda: server.get("/health").status == 503, "readiness to go off")
        assert server.post(COMPLETIONS, {"prompt": "a"}).status == 503
        for answer in streams:
            assert events(answer.read())[-1]["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
        assert "Traceback" not in "".join(server.log)


def test_a_second_signal_ends_the_ranks_in_step_too() -> None:
    with fake_server({"step_s": 0.02, "data_parallel": LOCKSTEP}, data_parallel_size=2) as server:
        stream = open_stream(server, 1)
        server.terminate()
        wait_until(lambda: server.get("/health").status == 503, "readiness to go off")
        server.terminate()
        assert "shutting down" in events(stream.read())[-1]["error"]["message"]
        assert server.wait() == 0


@pytest.mark.parametrize(
    ("place", "words"),
    [({"differ": True}, "ranks 0 and 1 differ in model.num_layers: 2 and 3"), ({"timeout_s": -1}, "timeout_seconds")],
)
def test_ranks_that_are_not_one_engine_do_not_start(place: dict[str, Any], words: str) -> None:
    given = {"engine": {"data_parallel": {**LOCKSTEP, **place}}, "data_parallel_size": 2}
    server = Server(["-m", "tests.server.program", json.dumps(given)])
    assert server.wait() != 0
    assert words in "".join(server.log)


def test_a_rank_killed_while_others_wait_for_it_ends_the_start() -> None:
    given = {"engine": {"data_parallel": LOCKSTEP}, "data_parallel_size": 2}
    server = Server(["-m", "tests.server.program", json.dumps(given)])
    wait_until(lambda: len(server.children()) == 2, "the engines to start")
    os.kill(server.children()[1], signal.SIGKILL)
    assert server.wait() != 0
    assert "rank 1: the engine process was killed by signal 9" in "".join(server.log)


@pytest.mark.parametrize("asleep", [False, True])
def test_no_rank_survives_its_server(asleep: bool) -> None:
    with fake_server({"step_s": 0.02, "data_parallel": LOCKSTEP}, data_parallel_size=2) as server:
        ranks = server.children()
        streams = [] if asleep else [open_stream(server, rank) for rank in (0, 1)]
        server.process.kill()
        wait_until(lambda: not any(map(alive, ranks)), "the ranks to end")
        for answer in streams:
            answer.close()
        server.process.communicate()
        server.check_folder()
