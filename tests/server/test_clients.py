# SPDX-License-Identifier: Apache-2.0
"""Clients that leave, clients that read slowly, and many clients at once."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.harness import DEADLINE_S, Server, events, fake_server

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def unhurried() -> Iterator[Server]:
    """Two requests run at a time, at most 50 steps a second: time to leave in."""
    with fake_server({"step_s": 0.02, "max_num_seqs": 2}) as server:
        yield server


def start(server: Server, **fields: Any) -> http.client.HTTPConnection:
    """Send a request and do not wait for its answer."""
    connection = server.connection()
    connection.request("POST", COMPLETIONS, json.dumps({"prompt": "abc", "max_tokens": 2000, **fields}).encode())
    return connection


def aborted(server: Server) -> float:
    return server.metric("vllm:request_success_total", finished_reason="abort")


def wait_idle(server: Server) -> None:
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        server.wait_metric(name, 0)


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_frees_all_it_had(unhurried: Server, stream: bool) -> None:
    before = aborted(unhurried)
    connection = start(unhurried, n=2, stream=stream)
    unhurried.wait_metric("vllm:num_requests_running", 2)
    assert unhurried.metric("vllm:kv_cache_usage_perc") > 0
    connection.close()
    wait_idle(unhurried)
    assert aborted(unhurried) == before + 2


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_the_queue(unhurried: Server, stream: bool) -> None:
    before = aborted(unhurried)
    running = start(unhurried, n=2, stream=True)
    unhurried.wait_metric("vllm:num_requests_running", 2)
    queued = start(unhurried, n=2, stream=stream)
    unhurried.wait_metric("vllm:num_requests_waiting", 2)
    queued.close()
    unhurried.wait_metric("vllm:num_requests_waiting", 0)
    assert unhurried.metric("vllm:num_requests_running") == 2
    running.close()
    wait_idle(unhurried)
    assert aborted(unhurried) == before + 4


def test_client_that_leaves_in_the_middle_of_a_stream(unhurried: Server) -> None:
    connection = start(unhurried, stream=True)
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    # The socket stays open while somebody holds the answer.
    answer.close()
    connection.close()
    wait_idle(unhurried)


def test_others_go_on_when_a_client_leaves(unhurried: Server) -> None:
    leaving = start(unhurried, stream=True)
    staying = start(unhurried, stream=True, max_tokens=60)
    unhurried.wait_metric("vllm:num_requests_running", 2)
    leaving.close()
    chunks = events(staying.getresponse().read())
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc" * 20


def test_stop_string_frees_what_the_engine_would_go_on_with(unhurried: Server) -> None:
    before = unhurried.metric("vllm:request_success_total", finished_reason="stop")
    assert unhurried.complete("abc", max_tokens=2000, stop="ca")["choices"][0]["text"] == "ab"
    wait_idle(unhurried)
    assert unhurried.metric("vllm:request_success_total", finished_reason="stop") == before + 1


def test_slow_reader_gets_everything_and_holds_up_nobody() -> None:
    # Tokens named in every chunk make an answer of several hundred kB, more than sockets hold.
    fields = {"prompt": "é" * 400, "max_tokens": 60000, "stream": True, "return_token_ids": True}
    body = json.dumps(fields).encode()
    with fake_server({"num_drafts": 3, "max_model_len": 65536}) as server, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(DEADLINE_S)
        slow.connect(("127.0.0.1", server.port))
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        slow.sendall(head.encode() + body)
        assert slow.recv(64).startswith(b"HTTP/1.1 200")
        # The engine finishes the request although its reader sleeps, and serves others.
        server.wait_metric("vllm:request_success_total", 1, finished_reason="length")
        assert server.complete("abc", max_tokens=3)["choices"][0]["text"] == "abc"
        # A server that is told to end waits for it.
        server.terminate()
        answer = bytearray()
        while part := slow.recv(1 << 16):
            answer += part
        assert server.wait() == 0
    chunks = events(dechunked(bytes(answer).partition(b"\r\n\r\n")[2]))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ids = [token for choice in choices for token in choice["token_ids"]]
    assert ids == list(("é" * 400).encode() * 75)
    assert "".join(choice["text"] for choice in choices) == "é" * 30000
    # What piled up came in few pieces.
    assert len(choices) < 60000 / 8


def dechunked(body: bytes) -> bytes:
    """The content of a body in HTTP's chunked coding."""
    whole = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        whole, body = whole + body[:length], body[length + 2 :]
        if not length:
            break
    return whole


async def converse(port: int, number: int) -> tuple[str, int]:
    """One stream of its own length and text: its text, and how many pieces it came in."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": f"<{number}é>", "max_tokens": 40 + number % 50, "stream": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    head_bytes, _, rest = answer.partition(b"\r\n\r\n")
    assert head_bytes.startswith(b"HTTP/1.1 200"), head_bytes
    chunks = events(dechunked(rest))
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    return "".join(chunk["choices"][0]["text"] for chunk in chunks), len(chunks)


def test_500_streams_at_once_lose_nothing() -> None:
    async def all_at_once(port: int) -> list[tuple[str, int]]:
        return await asyncio.gather(*(converse(port, number) for number in range(500)))

    with fake_server({"num_drafts": 1, "max_num_seqs": 512, "step_s": 0.05}) as server:
        answers = asyncio.run(asyncio.wait_for(all_at_once(server.port), DEADLINE_S))
        for number, (text, _) in enumerate(answers):
            expected = (f"<{number}é>" * 100).encode()[: 40 + number % 50].decode(errors="ignore")
            assert text == expected
        # The server did stream, and did not gather whole answers.
        assert sum(pieces for _, pieces in answers) > 5 * 500
        wait_idle(server)
        assert server.metric("vllm:request_success_total", finished_reason="length") == 500
        assert server.metric("vllm:generation_tokens_total") == sum(40 + number % 50 for number in range(500))
