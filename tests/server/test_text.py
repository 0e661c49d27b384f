# SPDX-License-Identifier: Apache-2.0
"""Text torture: characters over several tokens, stop strings anywhere, whole and in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.harness import Server, events

SAMPLES = (
    "naïve café",
    "日本語のテキスト",
    "👩‍👩‍👧‍👦 family, 🇫🇷 flag, 🏳️‍🌈",
    "e\u0301 and \u00e9",
    "עברית وعربي",
    "\U0001d52b\U0001d526 \U00010348",
    "zero\u200bwidth \ufeffmark",
    "tab\tnew\nline\r\nnul\x00end",
    "\u2028\u2029 separators",
)
SERVERS = pytest.mark.parametrize("kind", ["server", "drafting"])
RANDOM = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def both(server: Server, prompt: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    """The text of a streamed answer, and the choice of the same answer in one piece."""
    chunks = server.stream("/v1/completions", prompt=prompt, **fields)
    pieces = [choice for chunk in chunks for choice in chunk["choices"]]
    [choice] = server.complete(prompt, **fields)["choices"]
    for key in ("finish_reason", "stop_reason"):
        assert pieces[-1][key] == choice[key]
    return "".join(piece["text"] for piece in pieces), choice


def stopped(text: str, stop: list[str]) -> tuple[str, str | None]:
    """What is left of ``text`` and which string stopped it, reading character by character."""
    for end in range(len(text) + 1):
        hits = [(text.index(s), i) for i, s in enumerate(stop) if s in text[:end]]
        if hits:
            at, i = min(hits)
            return text[:at], stop[i]
    return text, None


@SERVERS
@pytest.mark.parametrize("text", SAMPLES)
def test_characters_over_several_tokens(kind: str, text: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(kind)
    streamed, choice = both(server, text, max_tokens=len(text.encode()))
    assert streamed == choice["text"] == text


@SERVERS
def test_output_cut_within_a_character_shows_no_part_of_it(kind: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(kind)
    text = "a😀b"
    for tokens in range(1, 6):
        whole = text.encode()[:tokens].decode(errors="ignore")
        streamed, choice = both(server, text, max_tokens=tokens)
        assert streamed == choice["text"] == whole


def test_no_piece_shows_a_broken_character(server: Server) -> None:
    text = "".join(SAMPLES)
    body = json.dumps({"prompt": text, "max_tokens": 700, "stream": True, "return_token_ids": True}).encode()
    chunks = events(server.post("/v1/completions", body).body)
    assert not any("\ufffd" in choice["text"] for chunk in chunks for choice in chunk["choices"])


@SERVERS
@pytest.mark.parametrize("stop", [["a", "is"], ["is", "a"], "is", ["user is"], ["r i", "is"], [" The user is"]])
def test_stop_at_the_earliest_place(kind: str, stop: Any, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(kind)
    text = " The user is a user"
    expected, reason = stopped(text, [stop] if isinstance(stop, str) else stop)
    streamed, choice = both(server, text, max_tokens=len(text), stop=stop)
    assert streamed == choice["text"] == expected
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)


@RANDOM
@given(
    text=st.text(st.sampled_from("aab é😀\n"), min_size=1, max_size=30),
    stop=st.lists(st.text(st.sampled_from("ab é😀\n"), min_size=1, max_size=4), max_size=4),
    drafts=st.booleans(),
)
def test_stop_strings_anywhere(server: Server, drafting: Server, text: str, stop: list[str], drafts: bool) -> None:
    expected, reason = stopped(text, stop)
    streamed, choice = both(drafting if drafts else server, text, max_tokens=len(text.encode()), stop=stop)
    assert streamed == choice["text"] == expected
    assert choice["finish_reason"] == ("length" if reason is None else "stop")
    assert choice["stop_reason"] == reason


@SERVERS
def test_ids_end_where_the_stop_string_is_complete(kind: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(kind)
    fields = {"max_tokens": 30, "stop": "def", "return_token_ids": True}
    [choice] = server.complete("abcdefghi", **fields)["choices"]
    assert (choice["text"], choice["token_ids"]) == ("abc", list(b"abcdef"))
    chunks = server.stream("/v1/completions", prompt="abcdefghi", **fields)
    assert [t for chunk in chunks for piece in chunk["choices"] for t in piece["token_ids"]] == list(b"abcdef")
    assert server.complete("abcdefghi", **fields)["usage"]["completion_tokens"] == 6


def test_stop_string_in_the_output_where_asked_for(server: Server) -> None:
    streamed, choice = both(server, "abcdefghi", max_tokens=30, stop="def", include_stop_str_in_output=True)
    assert streamed == choice["text"] == "abcdef"


def test_beginning_of_a_stop_string_is_shown_when_it_is_none(server: Server) -> None:
    streamed, choice = both(server, "abcabd", max_tokens=5, stop="abd")
    assert streamed == choice["text"] == "abcab"
    assert choice["finish_reason"] == "length"


@RANDOM
@given(data=st.binary(min_size=1, max_size=24), drafts=st.booleans())
def test_any_bytes_stream_as_they_come_whole(server: Server, drafting: Server, data: bytes, drafts: bool) -> None:
    where = drafting if drafts else server
    ids = list(data)
    [choice] = where.complete(ids, max_tokens=len(ids), return_token_ids=True)["choices"]
    chunks = where.stream("/v1/completions", prompt=ids, max_tokens=len(ids))
    assert "".join(piece["text"] for chunk in chunks for piece in chunk["choices"]) == choice["text"]
    assert choice["token_ids"] == ids
