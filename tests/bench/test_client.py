# SPDX-License-Identifier: Apache-2.0
"""One request at a time against a server that misbehaves in every way it can, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from paceline.bench.client import Client, ServerUnavailable
from paceline.core.results import RequestRecord
from tests.bench.scripted import (
    DONE,
    Answer,
    ScriptedServer,
    Streamed,
    Whole,
    as_asked,
    chat_chunk,
    event,
    scripted,
    text_chunk,
    usage_event,
)

COMPLETIONS = "/v1/completions"


def ask(answer: Answer, *, endpoint: str = COMPLETIONS) -> RequestRecord:
    """The record of one request that is answered so."""
    with scripted(ScriptedServer(lambda _: answer)) as server:
        [record] = send(server, endpoint, [{"prompt": "x"}])
    return record


def send(server: ScriptedServer, endpoint: str, bodies: list[Any]) -> list[RequestRecord]:
    """Records of requests sent one after the other."""

    async def work(client: Client) -> list[RequestRecord]:
        records = []
        for body in bodies:
            record = RequestRecord(prompt_len=0, intended_s=0.0, sent_s=0.0)
            await client.send(json.dumps(body).encode(), record)
            records.append(record)
        return records

    return with_client(server, work, endpoint)


def with_client(
    server: ScriptedServer,
    work: Callable[[Client], Awaitable[Any]],
    endpoint: str = COMPLETIONS,
    key: str | None = None,
) -> Any:
    async def run() -> Any:
        async with asyncio.timeout(60), Client(server.base_url, endpoint, key) as client:
            return await work(client)

    return asyncio.run(run())


def test_completion_in_order_and_counted() -> None:
    record = ask(Streamed([text_chunk("a"), text_chunk("b"), text_chunk("c"), usage_event(5, 3), DONE]))
    assert record.error is None
    assert record.text == "abc"
    assert (record.prompt_len, record.output_tokens) == (5, 3)
    assert len(record.chunk_s) == 3
    assert record.sent_s <= record.chunk_s[0] <= record.chunk_s[1] <= record.chunk_s[2]


def test_chat_in_order_and_counted() -> None:
    pieces = [chat_chunk({"role": "assistant", "content": ""}), chat_chunk({"content": "Hel"})]
    pieces += [chat_chunk({"content": "lo"}, finish_reason="stop"), usage_event(9, 2), DONE]
    record = ask(Streamed(pieces), endpoint="/v1/chat/completions")
    assert (record.error, record.text, record.output_tokens) == (None, "Hello", 2)
    assert (len(record.chunk_s), record.silent_chunks) == (3, 1)


def test_pieces_on_the_wire_need_not_be_messages() -> None:
    whole = b"".join([text_chunk("日本"), text_chunk("🥐"), usage_event(1, 4), DONE])
    record = ask(Streamed([whole[i : i + 11] for i in range(0, len(whole), 11)]))
    assert (record.error, record.text) == (None, "日本🥐")


def test_several_messages_in_one_piece_are_several_chunks() -> None:
    record = ask(Streamed([text_chunk("a") + text_chunk("b") + usage_event(1, 2) + DONE]))
    assert (record.error, record.text, len(record.chunk_s)) == (None, "ab", 2)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Streamed([text_chunk("a"), event({"error": {"message": "engine died", "code": 500}}), DONE]), "engine died"),
        (Streamed([text_chunk("a")]), "without [DONE]"),
        (Streamed([]), "without [DONE]"),
        (Streamed([DONE]), "without a single chunk"),
        (Streamed([text_chunk("a")], ending="cut"), "connection lost"),
        (Streamed([text_chunk("a"), text_chunk("b")[:20]], ending="reset"), "connection lost"),
        (Streamed([], ending="reset"), "connection lost"),
        (Whole(400, b'{"error": {"message": "prompt: too long", "code": 400}}'), "HTTP 400: prompt: too long"),
        (Whole(503, b"busy"), "HTTP 503: busy"),
        (Whole(500, b""), "HTTP 500"),
        (Streamed([b"no", b"body"], ending="cut", status=502), "connection lost"),
        (Whole(200, b"<html>Welcome</html>"), "without [DONE]"),
    ],
)
def test_failures_say_why(answer: Answer, says: str) -> None:
    record = ask(answer)
    assert not record.ok
    assert says in (record.error or "")


def test_what_arrived_before_a_failure_is_kept() -> None:
    record = ask(Streamed([text_chunk("half "), text_chunk("an answer")], ending="reset"))
    assert record.text == "half an answer"
    assert len(record.chunk_s) == 2


def test_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        gone = ScriptedServer(port=unused.getsockname()[1])
        [record] = send(gone, COMPLETIONS, [{}])
    assert record.error == "no connection: Connection refused"


def test_a_connection_is_used_again_unless_it_broke() -> None:
    answers = iter([as_asked, as_asked, lambda _: Streamed([], ending="reset"), as_asked])
    with scripted(ScriptedServer(lambda asked: next(answers)(asked))) as server:
        records = send(server, COMPLETIONS, [{"prompt": "x", "max_tokens": 3}] * 4)
    assert [record.ok for record in records] == [True, True, False, True]
    assert server.connections == 2


def closed(asked: Any) -> Answer:
    """The server closes the connection instead of answering."""
    raise ConnectionResetError


def test_a_request_that_finds_its_kept_connection_closed_is_sent_again() -> None:
    answers = iter([as_asked, closed, as_asked])
    with scripted(ScriptedServer(lambda asked: next(answers)(asked))) as server:
        records = send(server, COMPLETIONS, [{"prompt": "x", "max_tokens": 3}] * 2)
    assert [record.ok for record in records] == [True, True]
    assert server.connections == 2


def test_a_request_whose_new_connection_is_closed_has_failed() -> None:
    answers = iter([closed, as_asked])
    with scripted(ScriptedServer(lambda asked: next(answers)(asked))) as server:
        records = send(server, COMPLETIONS, [{"prompt": "x", "max_tokens": 3}] * 2)
    assert [record.ok for record in records] == [False, True]
    assert "connection lost" in (records[0].error or "")


def test_a_server_that_does_not_end_its_response_after_done_holds_nobody_up() -> None:
    pieces = [text_chunk("a"), usage_event(1, 1), DONE, *[b": still here\n\n"] * 10_000]
    with scripted(ScriptedServer(lambda _: Streamed(pieces))) as server:
        records = send(server, COMPLETIONS, [{}, {}])
    assert [record.error for record in records] == [None, None]


def test_the_key_is_sent_and_models_are_read() -> None:
    with scripted() as server:
        assert with_client(server, lambda client: client.wait_ready(0), key="sesame") == ["scripted"]
        record = RequestRecord(prompt_len=0, intended_s=0.0, sent_s=0.0)
        with_client(server, lambda client: client.send(b'{"prompt": "x", "max_tokens": 1}', record), key="sesame")
    assert server.asked[0].headers["authorization"] == "Bearer sesame"


def test_a_server_that_does_not_list_models_is_ready() -> None:
    with scripted(ScriptedServer(models=Whole(404, b""))) as server:
        assert with_client(server, lambda client: client.wait_ready(0)) == []


@pytest.mark.parametrize(
    ("models", "says"),
    [
        (Whole(401, b'{"error": {"message": "no key"}}'), "OPENAI_API_KEY"),
        (Whole(503, b'{"error": {"message": "loading"}}'), "loading"),
        (Whole(200, b"<html>"), "not answered as by an OpenAI server"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_with_a_hint(models: Answer, says: str) -> None:
    with scripted(ScriptedServer(models=models)) as server, pytest.raises(ServerUnavailable, match=says):
        with_client(server, lambda client: client.wait_ready(0.01))


def test_a_server_that_starts_late_is_waited_for() -> None:
    # Refused at first, ready by the second or third question.
    answers = iter([Whole(503, b"loading"), Whole(503, b"loading")])
    ready = Whole(200, b'{"data": [{"id": "late"}]}')

    class Late(ScriptedServer):
        def _small(self, asked: Any) -> Answer | None:
            return next(answers, ready)

    with scripted(Late()) as server:
        assert with_client(server, lambda client: client.wait_ready(30)) == ["late"]
