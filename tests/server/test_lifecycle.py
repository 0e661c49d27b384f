# SPDX-License-Identifier: Apache-2.0
"""Starting, crashing, draining, ending."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from typing import Any

import openai
import pytest

from tests.server.fake import KILL, POISON, RAISE
from tests.server.harness import DEADLINE_S, Server, alive, events, fake_server, wait_until

COMPLETIONS = "/v1/completions"
CRASH_DEADLINE_S = 2.0


def open_stream(server: Server, **fields: Any) -> http.client.HTTPResponse:
    """A stream of which the first chunk has been read."""
    connection = server.connection()
    body = {"prompt": "abc", "max_tokens": 2000, "stream": True, **fields}
    connection.request("POST", COMPLETIONS, json.dumps(body).encode())
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.readline().startswith(b"data: ")
    assert answer.readline() == b"\n"
    return answer


def check_dead_engine(server: Server, began: float) -> None:
    """From the crash on: readiness is off within the deadline, new requests are refused, the server lives."""
    while server.get("/health").status == 200:
        assert time.monotonic() - began < CRASH_DEADLINE_S
    refused = server.post(COMPLETIONS, {"prompt": "a"})
    assert refused.status == 503
    assert "retry-after" in refused.headers
    assert server.get("/health").error["code"] == 503
    assert server.get("/v1/models").status == 200
    assert server.metric("vllm:num_requests_running") == 0


def test_killed_engine_ends_every_stream_in_an_error_event() -> None:
    with fake_server({"step_s": 0.02, "max_num_seqs": 2}) as server:
        streams = [open_stream(server) for _ in range(2)]
        queued = server.connection()
        queued.request("POST", COMPLETIONS, b'{"prompt": "a", "stream": true}')
        whole = server.connection()
        whole.request("POST", COMPLETIONS, b'{"prompt": "a"}')
        server.wait_metric("vllm:num_requests_waiting", 2)
        began = time.monotonic()
        os.kill(server.engine_pid(), signal.SIGKILL)
        for answer in (*streams, queued.getresponse()):
            [*_, last] = events(answer.read())
            assert last["error"]["code"] == 500
            assert "killed by signal 9" in last["error"]["message"]
        assert whole.getresponse().status == 500
        assert time.monotonic() - began < CRASH_DEADLINE_S
        check_dead_engine(server, began)
        assert server.metric("vllm:request_success_total", finished_reason="error") == 4
        server.terminate()
        assert server.wait() == 0


@pytest.mark.parametrize(("token", "words"), [(KILL, "killed by signal 9"), (RAISE, "the script says so")])
def test_engine_that_fails_in_a_step(token: int, words: str) -> None:
    with fake_server({"step_s": 0.02}) as server:
        bystander = open_stream(server)
        began = time.monotonic()
        reply = server.post(COMPLETIONS, {"prompt": [97, 98, token], "max_tokens": 5})
        assert reply.status == 500
        assert words in reply.error["message"]
        [*_, last] = events(bystander.read())
        assert words in last["error"]["message"]
        check_dead_engine(server, began + 1.0)


def test_crash_is_an_exception_of_the_openai_client() -> None:
    with fake_server({"step_s": 0.02}) as server:
        client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)
        stream = client.completions.create(model="fake", prompt="abc", max_tokens=2000, stream=True)
        assert next(stream).choices[0].text
        os.kill(server.engine_pid(), signal.SIGKILL)
        with pytest.raises(openai.APIError, match="killed by signal 9"):
            list(stream)


def test_failed_row_ends_its_request_alone() -> None:
    with fake_server({"step_s": 0.01}) as server:
        bystander = open_stream(server, max_tokens=100)
        chunks = server.stream(COMPLETIONS, prompt=[97, 98, POISON], max_tokens=5)
        assert "the row was poisoned" in chunks[-1]["error"]["message"]
        whole = server.post(COMPLETIONS, {"prompt": [97, 98, POISON], "max_tokens": 5})
        assert whole.status == 500
        assert events(bystander.read())[-1]["choices"][0]["finish_reason"] == "length"
        server.wait_metric("vllm:kv_cache_usage_perc", 0)
        assert server.get("/health").status == 200


def test_sigterm_lets_streams_finish_and_refuses_new_requests() -> None:
    with fake_server({"step_s": 0.02}) as server:
        stream = open_stream(server, max_tokens=100)
        whole = server.connection()
        whole.request("POST", COMPLETIONS, b'{"prompt": "ab", "max_tokens": 100}')
        server.wait_metric("vllm:num_requests_running", 2)
        kept = server.connection()
        kept.connect()
        server.terminate()
        wait_until(lambda: server.get("/health").status == 503, "readiness to go off")
        refused = server.post(COMPLETIONS, {"prompt": "a"})
        assert refused.status == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert "shutting down" in refused.error["message"]
        # A connection opened before the signal is no way in either.
        kept.request("POST", COMPLETIONS, b'{"prompt": "a", "stream": true}')
        assert kept.getresponse().status == 503
        chunks = events(stream.read())
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert json.loads(whole.getresponse().read())["usage"]["completion_tokens"] == 100
        assert server.wait() == 0


def test_idle_server_ends_on_sigint() -> None:
    with fake_server() as server:
        server.complete("a", max_tokens=1)
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 0


def test_second_signal_ends_streams_in_an_error_event() -> None:
    with fake_server({"step_s": 0.02}) as server:
        stream = open_stream(server)
        server.terminate()
        wait_until(lambda: server.get("/health").status == 503, "readiness to go off")
        server.terminate()
        assert "shutting down" in events(stream.read())[-1]["error"]["message"]
        assert server.wait() == 0


def test_streams_that_take_longer_than_the_timeout_end_in_an_error_event() -> None:
    with fake_server({"step_s": 0.02}, shutdown_timeout_s=0.2) as server:
        stream = open_stream(server)
        server.terminate()
        assert "shutting down" in events(stream.read())[-1]["error"]["message"]
        assert server.wait() == 0


def test_engine_survives_the_signals_that_reach_the_whole_group() -> None:
    with fake_server({"step_s": 0.02}) as server:
        stream = open_stream(server, max_tokens=60)
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(server.engine_pid(), number)
        assert events(stream.read())[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("busy", [True, False])
def test_engine_ends_when_the_server_is_killed(busy: bool) -> None:
    with fake_server({"step_s": 0.01}) as server:
        if busy:
            open_stream(server)
        engine = server.engine_pid()
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not alive(engine), "the engine to end")


def test_port_in_use_is_said_before_anything_is_loaded() -> None:
    with fake_server() as server:
        second = Server(["-m", "paceline", "serve", "--port", str(server.port)])
        assert second.wait() == 2
        assert f"port {server.port}" in "".join(second.log)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["no-such-model"], "no-such-model"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size: only 1"),
        (["--speculative-config", "{"], "--speculative-config"),
        (["--speculative-config", "[]"], "--speculative-config"),
        (["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2, "depth": 1}'], "depth"),
        (["--block-size", "0"], "block_size"),
        (["--stream-interval", "0"], "--stream-interval"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--host", "203.0.113.1"], "203.0.113.1"),
    ],
)
def test_options_that_cannot_be_honoured_are_named(flags: list[str], words: str) -> None:
    server = Server(["-m", "paceline", "serve", "--port", "0", *flags])
    assert server.wait() == 2
    said = "".join(server.log)
    assert words in said
    assert "Traceback" not in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_while_loading_leaves_nothing_behind(number: signal.Signals) -> None:
    server = Server(["-m", "paceline", "serve", "--port", "0"])
    wait_until(server.children, "the engine to start")
    engines = server.children()
    server.process.send_signal(number)
    assert server.wait() == 128 + number, server.log
    wait_until(lambda: not any(map(alive, engines)), "the engine to end")
    assert "Traceback" not in "".join(server.log)


@pytest.mark.parametrize(("patience_s", "said"), [(0.0, True), (1000.0, False)])
def test_a_start_that_takes_long_says_what_it_may_be_waiting_for(patience_s: float, said: bool) -> None:
    with fake_server(patience_s=patience_s) as server:
        assert any("compiles kernels" in line for line in server.log) == said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_while_the_engine_is_being_started_ends_it_too(number: signal.Signals) -> None:
    """At the very moment at which the process exists and its owner does not know it yet."""
    program = (
        "import os, signal, subprocess, sys\n"
        "from paceline.cli import main\n"
        "class Interrupted(subprocess.Popen):\n"
        "    def __init__(self, *args, **kwargs):\n"
        "        super().__init__(*args, **kwargs)\n"
        f"        print('engine', self.pid, flush=True); os.kill(os.getpid(), {int(number)})\n"
        "subprocess.Popen = Interrupted\n"
        "sys.exit(main(['serve', '--port', '0']))"
    )
    server = Server(["-c", program])
    assert server.wait() == 128 + number, server.log
    [engine] = [int(line.split()[1]) for line in server.log if line.startswith("engine ")]
    wait_until(lambda: not alive(engine), "the engine to end")
    assert "Traceback" not in "".join(server.log)
