# SPDX-License-Identifier: Apache-2.0
"""Talks to the server under test: one streamed request, and the small ones around a run."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from paceline.bench.streams import AnswerReader, error_text, shortened
from paceline.core.results import RequestRecord

REQUEST_TIMEOUT_S = 6 * 3600.0
"""For a whole answer: a queue can be long, but a server that has died silently must not hold the run for ever."""
SMALL_TIMEOUT_S = 30.0
"""For requests that need no model."""
KEEP_ALIVE_S = 3.0
"""Idle connections are dropped before a server does so (uvicorn after 5 s), which could meet a request under way."""
AFTER_DONE_S = 1.0
"""How long the end of the response may follow ``[DONE]``; then the connection is not used again."""
RETRY_S = 0.25

clock = time.perf_counter
"""Of all times in a run."""


class ServerUnavailable(Exception):
    """The server cannot be benchmarked; the message says why and what to do."""


class Refused(Exception):
    """An answer other than 200 to a small request."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"HTTP {status}: {reason}")
        self.status = status


class Client:
    """Connections to one server. ``base_url`` has no path; ``endpoint`` is the path that answers prompts."""

    def __init__(self, base_url: str, endpoint: str, api_key: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self._url = self.base_url + endpoint
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def __aenter__(self) -> Self:
        # How many requests are in flight is decided by whoever sends them.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_mark_reused)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, trace_configs=[trace])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def send(self, body: bytes, record: RequestRecord) -> None:
        """Send a request now and read its answer to the end; ``record.error`` says what failed, if anything did.

        A server may close a connection that is kept open, just as the next request takes it. Such a request, of whose
        answer nothing has come, is sent again, as HTTP clients do.
        """
        record.sent_s = clock()
        while not await self._send(body, record):
            pass

    async def _send(self, body: bytes, record: RequestRecord) -> bool:
        """One try; False if the connection was an old one, and gone."""
        reader = AnswerReader(record)
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        failure: str | None = None
        answered, reused = False, _Reused()
        try:
            async with self._session.post(self._url, data=body, timeout=timeout, trace_request_ctx=reused) as response:
                answered = True
                if response.status != 200:
                    record.error = f"HTTP {response.status}: {error_text(await response.read())}"
                    return True
                async for data in response.content.iter_any():
                    reader.feed(data, clock())
                    if reader.over:
                        await _drain(response)
                        break
        except TimeoutError:
            failure = f"no end of the answer within {REQUEST_TIMEOUT_S:.0f} s"
        except aiohttp.ClientConnectorError as error:
            failure = f"no connection: {_reason(error)}"
        except (aiohttp.ClientError, OSError) as error:
            if reused.yes and not answered:
                return False
            failure = f"connection lost: {_reason(error)}"
        reader.end(failure)
        return True

    async def get(self, path: str, timeout_s: float = SMALL_TIMEOUT_S) -> bytes:
        """The body of a successful GET.

        Raises:
            Refused: any other answer.
            aiohttp.ClientError, OSError, TimeoutError: none.
        """
        return await self._ask("GET", path, None, timeout_s)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The parsed body of a successful POST; raises as `get`."""
        return msgspec.json.decode(await self._ask("POST", path, msgspec.json.encode(body), SMALL_TIMEOUT_S))

    async def _ask(self, method: str, path: str, body: bytes | None, timeout_s: float) -> bytes:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.request(method, self.base_url + path, data=body, timeout=timeout) as response:
            answer = await response.read()
            if response.status != 200:
                raise Refused(response.status, error_text(answer))
            return answer

    async def wait_ready(self, timeout_s: float) -> list[str]:
        """The models that the server offers, asked for until it answers; an old server may name none.

        Raises:
            ServerUnavailable: it does not answer within ``timeout_s`` (asked once at least), or refuses.
        """
        ends = clock() + timeout_s
        while True:
            try:
                return _model_names(await self.get("/v1/models", max(5.0, timeout_s)))
            except Refused as error:
                if error.status == 404:
                    return []
                if error.status in (401, 403):
                    raise ServerUnavailable(
                        f"{self.base_url} wants an API key ({error}); put it into the environment as OPENAI_API_KEY"
                    ) from None
                problem = str(error)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                problem = _reason(error)
            if clock() >= ends:
                raise ServerUnavailable(
                    f"no server answers at {self.base_url}/v1/models: {problem}. Start one, for example"
                    " `paceline serve smollm2 --port 8000`, and name its address with --base-url, or --host and"
                    " --port; --ready-check-timeout-sec waits for one that is still starting"
                )
            await asyncio.sleep(RETRY_S)


@dataclass(slots=True)
class _Reused:
    """Whether a request went over a connection that had carried one before."""

    yes: bool = False


async def _mark_reused(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.yes = True


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read to the end of a response whose answer is complete, so that its connection can be used again."""
    try:
        async with asyncio.timeout(AFTER_DONE_S):
            while await response.content.readany():
                pass
    except (TimeoutError, aiohttp.ClientError, OSError):
        response.close()


def _model_names(body: bytes) -> list[str]:
    try:
        return [card["id"] for card in msgspec.json.decode(body)["data"]]
    except (msgspec.DecodeError, KeyError, TypeError):
        raise ServerUnavailable(f"/v1/models is not answered as by an OpenAI server: {shortened(body)}") from None


def _reason(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return os.strerror(error.os_error.errno)
    return shortened(str(error)) or type(error).__name__
