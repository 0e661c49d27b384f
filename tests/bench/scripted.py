# SPDX-License-Identifier: Apache-2.0
"""A server that answers what a test says, over real sockets, in a thread of its own.

Its tokens are bytes: /tokenize and /detokenize translate a text and its UTF-8, with one token in front of a prompt
where special tokens are asked for.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

START = 256
"""The token in front of every prompt."""
DONE = b"data: [DONE]\n\n"
DEADLINE_S = 30.0
PAUSE_S = 0.002
"""Between the pieces of an answer, so that they usually arrive apart; nothing asserted depends on it."""


@dataclass(frozen=True)
class Asked:
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True)
class Whole:
    """An answer in one piece."""

    status: int
    body: bytes


@dataclass(frozen=True)
class Streamed:
    """An answer in pieces. ``ending``: how the response ends; ``status`` goes first in any case."""

    pieces: Sequence[bytes]
    ending: str = "proper"
    """proper, cut (closed without the last chunk) or reset (the connection is torn down)"""
    status: int = 200


Answer = Whole | Streamed
Script = Callable[[Asked], Answer]


def event(message: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(message, ensure_ascii=False).encode() + b"\n\n"


def text_chunk(text: str, **choice: Any) -> bytes:
    """A chunk of /v1/completions."""
    return event(
        {"object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": None, **choice}]}
    )


def chat_chunk(delta: dict[str, Any], **choice: Any) -> bytes:
    """A chunk of /v1/chat/completions."""
    return event({"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, **choice}]})


def usage_event(prompt_tokens: int, completion_tokens: int) -> bytes:
    """The chunk without choices that carries the token counts."""
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return event({"choices": [], "usage": {**counts, "total_tokens": sum(counts.values())}})


def as_asked(asked: Asked) -> Answer:
    """A well-behaved server: as many tokens as asked for, one per chunk, then the counts."""
    body = asked.body
    if asked.path == "/v1/chat/completions":
        content = body["messages"][0]["content"]
        n, prompt = body["max_completion_tokens"], len(content.encode())
        pieces = [chat_chunk({"role": "assistant", "content": ""})] + [chat_chunk({"content": "x"})] * n
    else:
        n, given = body["max_tokens"], body["prompt"]
        prompt = len(given) if isinstance(given, list) else 1 + len(given.encode())
        pieces = [text_chunk("x")] * n
    return Streamed([*pieces, usage_event(prompt, n), DONE])


@dataclass
class ScriptedServer:
    """Where it listens, what it was asked, and what it saw of the client's behaviour."""

    script: Script = as_asked
    metrics: list[str] = field(default_factory=list)
    """Answers of /metrics, one after the other; the last stays. None: 404."""
    models: Answer | None = None
    """Another answer of /v1/models than one model, `scripted`."""
    port: int = 0
    asked: list[Asked] = field(default_factory=list)
    """Requests for answers, in the order in which they came."""
    connections: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    tokenizes: bool = True

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def bodies(self) -> list[Any]:
        return [asked.body for asked in self.asked]

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            async for asked in _requests(reader):
                if not await self._answer(asked, writer):
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, asked: Asked, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; whether the connection goes on."""
        answer = self._small(asked)
        if answer is None:
            self.asked.append(asked)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            try:
                return await _write(self.script(asked), writer)
            finally:
                self.in_flight -= 1
        return await _write(answer, writer)

    def _small(self, asked: Asked) -> Answer | None:
        """The answer of an endpoint that needs no model."""
        if asked.path == "/v1/models":
            return self.models or _json({"object": "list", "data": [{"id": "scripted", "object": "model"}]})
        if asked.path == "/metrics":
            if not self.metrics:
                return Whole(404, b"not here")
            return Whole(200, (self.metrics.pop(0) if len(self.metrics) > 1 else self.metrics[0]).encode())
        if asked.path in ("/tokenize", "/detokenize") and not self.tokenizes:
            return Whole(404, b'{"detail": "Not Found"}')
        if asked.path == "/tokenize":
            if "messages" in asked.body:
                return _json({"tokens": [START, *b"<user>", *asked.body["messages"][0]["content"].encode()]})
            special = [START] if asked.body.get("add_special_tokens", True) else []
            return _json({"tokens": special + list(asked.body["prompt"].encode())})
        if asked.path == "/detokenize":
            return _json({"prompt": bytes(asked.body["tokens"]).decode("utf-8", "replace")})
        return None


def _json(body: Any) -> Whole:
    return Whole(200, json.dumps(body).encode())


async def _requests(reader: asyncio.StreamReader) -> AsyncIterator[Asked]:
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode().strip().split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        yield Asked(method, path, headers, json.loads(raw) if raw else None)


async def _write(answer: Answer, writer: asyncio.StreamWriter) -> bool:
    head = f"HTTP/1.1 {answer.status} Said So\r\ncontent-type: application/json\r\n"
    if isinstance(answer, Whole):
        writer.write(f"{head}content-length: {len(answer.body)}\r\n\r\n".encode() + answer.body)
        await writer.drain()
        return True
    writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
    for piece in answer.pieces:
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        await writer.drain()
        await asyncio.sleep(PAUSE_S)
    if answer.ending == "reset":
        writer.transport.abort()
        return False
    if answer.ending == "proper":
        writer.write(b"0\r\n\r\n")
        await writer.drain()
    return answer.ending == "proper"


@contextmanager
def scripted(server: ScriptedServer | None = None) -> Iterator[ScriptedServer]:
    """A running server for the duration of the block; its thread and port are gone afterwards."""
    server = server or ScriptedServer()
    ready, ends = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        listener = await asyncio.start_server(server.handle, "127.0.0.1", 0, backlog=1024)
        server.port = listener.sockets[0].getsockname()[1]
        ready.set()
        await ends.wait()
        listener.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    thread = threading.Thread(target=_run, args=(loop, serve), daemon=True)
    thread.start()
    try:
        assert ready.wait(DEADLINE_S)
        yield server
    finally:
        loop.call_soon_threadsafe(ends.set)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def _run(loop: asyncio.AbstractEventLoop, serve: Callable[[], Awaitable[None]]) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(serve())
    finally:
        loop.close()
