# SPDX-License-Identifier: Apache-2.0
"""/v1/chat/completions. The fake engine repeats the conversation as its template renders it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.harness import Server

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
RENDERED = "user: hello\nassistant: "


def answer(server: Server, messages: Any, **fields: Any) -> dict[str, Any]:
    reply = server.post(CHAT, {"messages": messages, **fields})
    assert reply.status == 200, reply.text
    return dict(reply.json)


def test_answer(server: Server) -> None:
    reply = answer(server, HELLO, max_tokens=11)
    assert reply["id"].startswith("chatcmpl-")
    assert reply["object"] == "chat.completion"
    assert reply["usage"] == {
        "prompt_tokens": len(RENDERED),
        "total_tokens": len(RENDERED) + 11,
        "completion_tokens": 11,
    }
    [choice] = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": "user: hello"}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)


def test_chunks_have_the_keys_and_order_of_the_reference(server: Server) -> None:
    first, *chunks, last = server.stream(
        CHAT, messages=HELLO, max_tokens=3, return_token_ids=True, stream_options={"include_usage": True}
    )
    assert list(first) == ["id", "object", "created", "model", "choices", "prompt_token_ids", "prompt_text"]
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert first["prompt_token_ids"] == list(RENDERED.encode())
    pieces = [choice for chunk in chunks for choice in chunk["choices"]]
    for piece in pieces[:-1]:
        assert list(piece) == ["index", "delta", "logprobs", "finish_reason", "token_ids"]
    assert list(pieces[-1]) == ["index", "delta", "logprobs", "finish_reason", "stop_reason", "token_ids"]
    assert "".join(piece["delta"]["content"] for piece in pieces) == "use"
    assert [piece["finish_reason"] for piece in pieces] == [*[None] * (len(pieces) - 1), "length"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert "system_fingerprint" in last


def test_role_comes_once_per_choice(drafting: Server) -> None:
    chunks = drafting.stream(CHAT, messages=HELLO, n=3, max_tokens=9)
    roles, contents = [0, 0, 0], ["", "", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            roles[choice["index"]] += "role" in choice["delta"]
            contents[choice["index"]] += choice["delta"]["content"]
    assert roles == [1, 1, 1]
    assert contents == ["user: hel"] * 3


def test_content_in_parts_is_joined(server: Server) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    reply = answer(server, [{"role": "user", "content": parts}], max_tokens=13)
    assert reply["choices"][0]["message"]["content"] == "user: one\ntwo"


def test_answers_come_back_as_clients_send_them(server: Server) -> None:
    messages = [
        *HELLO,
        {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "bye"},
    ]
    reply = answer(server, messages, max_tokens=26)
    assert reply["choices"][0]["message"]["content"] == "user: hello\nassistant: hi\n"[:26]


def test_without_a_limit_the_answer_fills_the_context(drafting: Server) -> None:
    reply = answer(drafting, HELLO)
    assert reply["usage"]["total_tokens"] == 2048
    assert reply["choices"][0]["finish_reason"] == "length"


def test_either_name_of_the_limit(server: Server) -> None:
    assert answer(server, HELLO, max_completion_tokens=2)["usage"]["completion_tokens"] == 2
    both = server.post(CHAT, {"messages": HELLO, "max_tokens": 2, "max_completion_tokens": 2})
    assert both.status == 400
    assert both.error["param"] == "max_completion_tokens"


def test_template_without_an_opening_for_the_answer(server: Server) -> None:
    reply = answer(server, HELLO, max_tokens=1, add_generation_prompt=False)
    assert reply["usage"]["prompt_tokens"] == len("user: hello\n")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": "x", "extra": 1}], "messages[0].extra"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "nobody", "content": "x"}], "messages"),
        ("hello", "messages"),
        (["hello"], "messages[0]"),
    ],
)
def test_messages_that_cannot_be_answered(server: Server, messages: Any, param: str) -> None:
    reply = server.post(CHAT, {"messages": messages})
    assert reply.status == 400
    assert reply.error["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_fields_that_this_server_lacks_are_refused_by_name(server: Server, fields: Any, param: str) -> None:
    reply = server.post(CHAT, {"messages": HELLO, **fields})
    assert reply.status == 400
    assert reply.error["param"] == param
