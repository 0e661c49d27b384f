# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities as clients get them; `fake.scored` says what the engine reports."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.fake import logprob
from tests.server.harness import Server

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
SERVERS = pytest.mark.parametrize("kind", ["server", "drafting"])


@SERVERS
def test_completion(kind: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(kind)
    [choice] = server.complete("adg", max_tokens=3, logprobs=1)["choices"]
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [logprob(ord(c)) for c in "adg"],
        "tokens": ["a", "d", "g"],
        "top_logprobs": [{c: logprob(ord(c)), chr(ord(c) + 1): -0.5} for c in "adg"],
    }
    [only] = server.complete("adg", max_tokens=3, logprobs=0)["choices"]
    assert only["logprobs"]["top_logprobs"] == [{c: logprob(ord(c))} for c in "adg"]


@SERVERS
def test_pieces_add_up_to_the_whole(kind: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(kind)
    fields = {"prompt": "abc déf 😀", "max_tokens": 30, "logprobs": 2}
    [whole] = server.complete(**fields)["choices"]
    pieces = [c for chunk in server.stream("/v1/completions", **fields) for c in chunk["choices"]]
    for key, value in whole["logprobs"].items():
        assert [entry for piece in pieces for entry in piece["logprobs"][key]] == value
    assert len(whole["logprobs"]["tokens"]) == 30


def test_cut_where_the_ids_are_cut(drafting: Server) -> None:
    for fields in ({"max_tokens": 2}, {"max_tokens": 20, "stop": "b"}, {"max_tokens": 20, "stop_token_ids": [98]}):
        [choice] = drafting.complete("abcdefgh", logprobs=0, return_token_ids=True, **fields)["choices"]
        assert choice["token_ids"] == [97, 98]
        assert choice["logprobs"]["tokens"] == ["a", "b"]


def test_bytes_of_a_character_over_several_tokens(server: Server) -> None:
    [choice] = server.complete("é", max_tokens=2, logprobs=0)["choices"]
    assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]


def test_tokens_named_by_id(server: Server) -> None:
    [choice] = server.complete("ad", max_tokens=2, logprobs=1, return_tokens_as_token_ids=True)["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:97", "token_id:100"]
    assert list(choice["logprobs"]["top_logprobs"][0]) == ["token_id:97", "token_id:98"]


def chat(server: Server, **fields: Any) -> list[dict[str, Any]]:
    reply = server.post(CHAT, {"messages": HELLO, "max_tokens": 2, **fields})
    assert reply.status == 200, reply.text
    return list(reply.json["choices"][0]["logprobs"]["content"])


def test_chat(server: Server) -> None:
    first, second = chat(server, logprobs=True, top_logprobs=2)
    assert first == {
        "token": "u",
        "logprob": logprob(ord("u")),
        "bytes": [ord("u")],
        # The most likely tokens, best first; the chosen one is only the second.
        "top_logprobs": [
            {"token": "v", "logprob": -0.5, "bytes": [ord("v")]},
            {"token": "u", "logprob": logprob(ord("u")), "bytes": [ord("u")]},
        ],
    }
    assert second["token"] == "s"
    assert chat(server, logprobs=True)[0]["top_logprobs"] == []
    chunks = server.stream(CHAT, messages=HELLO, max_tokens=2, logprobs=True, top_logprobs=2)
    pieces = [c["logprobs"]["content"] for chunk in chunks[1:] for c in chunk["choices"]]
    assert [entry for piece in pieces for entry in piece] == [first, second]
