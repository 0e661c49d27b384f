# SPDX-License-Identifier: Apache-2.0
"""A streamed answer as it arrives: bytes to server-sent events to a request's record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from paceline.core.results import RequestRecord

DONE = b"[DONE]"
UNFINISHED = frozenset({"abort", "error"})
"""Finish reasons with which a server says that an answer is not what was asked for."""
MAX_ERROR_CHARACTERS = 300


class StreamFailed(Exception):
    """The server said that this answer failed, or said something that is no answer; the message says what."""


class Delta(msgspec.Struct):
    """The new part of a chat answer."""

    role: str | None = None
    content: str | None = None


class Choice(msgspec.Struct):
    """The new part of an answer; ``text`` in completions, ``delta`` in chat."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class Usage(msgspec.Struct):
    """Counts in tokens."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Message(msgspec.Struct):
    """The data of one event, in either format. ``object`` and ``message``: some servers put errors at the top."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    object: str | None = None
    message: Any = None


_decode = msgspec.json.Decoder(Message).decode


class EventSplitter:
    """Cuts bytes, however they were split on their way, into the data of server-sent events.

    Lines end in LF or CRLF. Comments and fields other than ``data`` and ``event`` are skipped.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Data of the events that ``data`` completes, one after the other.

        Raises:
            StreamFailed: an event is named ``error``.
        """
        rest = self._rest + data if self._rest else data
        if b"\r" in rest:
            # A CR at the very end may be half a line end. JSON has no bare CR, so nothing else is touched.
            rest = rest.replace(b"\r\n", b"\n")
        *events, self._rest = rest.split(b"\n\n")
        for event in events:
            if (found := _data(event)) is not None:
                yield found

    def end(self) -> bytes:
        """Data of a last line that lacks its end and the empty line behind it."""
        return self._rest.removeprefix(b"data:").strip()


def _data(event: bytes) -> bytes | None:
    """The data of one event; None if it has none."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = event.split(b"\n")
    data = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
    if any(line.startswith(b"event:") and line[6:].strip() == b"error" for line in lines):
        raise StreamFailed(error_text(b"\n".join(data)))
    return b"\n".join(data) if data else None


class AnswerReader:
    """Reads one streamed answer into ``record``: arrival times, text, token counts, and why it failed if it did.

    A chunk is a message with choices. Its time is when its bytes arrived, so chunks that arrive together have a gap
    of 0. Tokens are those of the server's usage, else of the chunks' token ids; ``record.output_tokens`` stays 0
    where neither was sent. Nothing more is read once the answer is over, by ``[DONE]`` or by a failure.
    """

    def __init__(self, record: RequestRecord) -> None:
        self.over = False
        self._record = record
        self._splitter = EventSplitter()
        self._text: list[str] = []
        self._counts: list[int | None] = []
        self._completion_tokens: int | None = None

    def feed(self, data: bytes, now: float) -> None:
        """Take bytes that arrived at ``now``."""
        try:
            for event in self._splitter.feed(data):
                if self.over:
                    return
                self._take(event, now)
        except StreamFailed as error:
            self.over = True
            self._record.error = str(error)

    def end(self, failure: str | None = None) -> None:
        """Nothing comes any more, because of ``failure`` if that is given: complete the record."""
        record = self._record
        if not self.over and self._splitter.end() == DONE:
            self.over = True
        if not self.over:
            record.error = failure or "the stream ended without [DONE]"
        elif record.error is None and not record.chunk_s:
            record.error = "the stream ended without a single chunk"
        record.text = "".join(self._text)
        known = [count for count in self._counts if count is not None]
        if len(known) == len(self._counts):
            record.chunk_tokens = known
        record.output_tokens = self._completion_tokens or sum(record.chunk_tokens or ())

    def _take(self, event: bytes, now: float) -> None:
        if event == DONE:
            self.over = True
            return
        if not event:
            return
        try:
            message = _decode(event)
        except msgspec.DecodeError as error:  # ValidationError is one too
            raise StreamFailed(f"a message that is not understood ({error}): {shortened(event)}") from None
        if message.error is not None or message.object == "error":
            raise StreamFailed(error_text(event))
        usage = message.usage
        completion_tokens = None if usage is None else usage.completion_tokens
        if message.choices:
            self._chunk(message.choices[0], completion_tokens, now)
        if completion_tokens is not None:
            self._completion_tokens = completion_tokens
        if usage is not None and usage.prompt_tokens is not None:
            self._record.prompt_len = usage.prompt_tokens

    def _chunk(self, choice: Choice, completion_tokens: int | None, now: float) -> None:
        record = self._record
        record.chunk_s.append(now)
        text, ids = choice.text, choice.token_ids
        opens = False
        if choice.delta is not None:
            text = choice.delta.content
            opens = choice.delta.role is not None and not (text or ids or choice.finish_reason)
        if text:
            self._text.append(text)
        if opens:
            record.silent_chunks += 1
            self._counts.append(0)
        elif ids is not None:
            self._counts.append(len(ids))
        elif completion_tokens is not None:
            self._counts.append(max(0, completion_tokens - (self._completion_tokens or 0)))
        else:
            self._counts.append(None)
        if choice.finish_reason in UNFINISHED:
            raise StreamFailed(f"finish_reason: {choice.finish_reason}")


def shortened(text: bytes | str) -> str:
    """On one line, and no longer than a report can show."""
    plain = " ".join((text if isinstance(text, str) else text.decode("utf-8", "replace")).split())
    return plain if len(plain) <= MAX_ERROR_CHARACTERS else plain[: MAX_ERROR_CHARACTERS - 3] + "..."


def error_text(body: bytes) -> str:
    """What an error says, from a body in OpenAI's form or any other."""
    try:
        found: Any = msgspec.json.decode(body)
    except msgspec.DecodeError:
        found = None
    if isinstance(found, dict):
        found = found.get("error", found)
    if isinstance(found, dict):
        found = found.get("message") or found.get("detail") or found.get("type")
    return shortened(found if isinstance(found, str) and found else body) or "no reason given"
