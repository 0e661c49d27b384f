# SPDX-License-Identifier: Apache-2.0
"""/v1/completions: forms of prompts, choices, chunks, counts. The fake engine repeats the prompt (see `fake`)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.fake import END
from tests.server.harness import Server


def texts(reply: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in reply["choices"]]


def test_answer_has_the_keys_that_clients_read(server: Server) -> None:
    reply = server.complete("abcd", max_tokens=3)
    assert list(reply) == ["id", "object", "created", "model", "choices", "usage", "system_fingerprint"]
    assert reply["id"].startswith("cmpl-")
    assert (reply["object"], reply["model"]) == ("text_completion", "fake")
    assert reply["usage"] == {"prompt_tokens": 4, "total_tokens": 7, "completion_tokens": 3}
    assert reply["choices"] == [
        {
            "index": 0,
            "text": "abc",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "prompt_token_ids": None,
            "token_ids": None,
        }
    ]


def test_chunks_have_the_keys_and_order_of_the_reference(server: Server) -> None:
    *chunks, last = server.stream(
        "/v1/completions",
        prompt="ab",
        max_tokens=2,
        return_token_ids=True,
        stream_options={"include_usage": True},
    )
    assert all(list(chunk) == ["id", "object", "created", "model", "choices"] for chunk in chunks)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    keys = ["index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids"]
    assert all(list(choice) == keys for choice in choices)
    assert "".join(choice["text"] for choice in choices) == "ab"
    assert [token for choice in choices for token in choice["token_ids"]] == [97, 98]
    assert [choice["prompt_token_ids"] for choice in choices] == [[97, 98], *[None] * (len(choices) - 1)]
    assert [choice["finish_reason"] for choice in choices] == [*[None] * (len(choices) - 1), "length"]
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 2, "total_tokens": 4, "completion_tokens": 2}
    assert last["system_fingerprint"].startswith("paceline-")


def test_without_usage_the_last_piece_carries_the_fingerprint(server: Server) -> None:
    chunks = server.stream("/v1/completions", prompt="ab", max_tokens=2)
    assert "system_fingerprint" in chunks[-1]
    assert not any("usage" in chunk for chunk in chunks)


def test_counts_in_every_chunk(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.stream("/v1/completions", prompt="ab", max_tokens=3, stream_options=options)
    counted = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counted == sorted(counted)
    assert counted[-1] == 3


def test_chunks_of_several_tokens(drafting: Server) -> None:
    chunks = drafting.stream("/v1/completions", prompt="abcdefgh", max_tokens=8, return_token_ids=True)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert max(len(choice["token_ids"]) for choice in choices) >= 4
    assert "".join(choice["text"] for choice in choices) == "abcdefgh"


def test_stream_interval_gathers_tokens(server: Server) -> None:
    chunks = server.stream("/v1/completions", prompt="abc", max_tokens=50, stream_interval=20, return_token_ids=True)
    sizes = [len(choice["token_ids"]) for chunk in chunks for choice in chunk["choices"]]
    assert sum(sizes) == 50
    assert all(size >= 20 for size in sizes[1:-1])


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("abc", ["ab"]),
        (["abc", "xyz"], ["ab", "xy"]),
        ([104, 105], ["hi"]),
        ([[104, 105], [65, 66, 67]], ["hi", "AB"]),
    ],
)
def test_forms_of_prompts(server: Server, prompt: Any, expected: list[str]) -> None:
    assert texts(server.complete(prompt, max_tokens=2)) == expected


def test_several_prompts_with_several_choices_keep_their_order(drafting: Server) -> None:
    reply = drafting.complete(["abc", "xyz"], n=2, max_tokens=5, return_token_ids=True)
    assert [(choice["index"], choice["text"]) for choice in reply["choices"]] == [
        (0, "abcab"),
        (1, "abcab"),
        (2, "xyzxy"),
        (3, "xyzxy"),
    ]
    assert reply["choices"][2]["prompt_token_ids"] == list(b"xyz")
    assert reply["usage"] == {"prompt_tokens": 6, "total_tokens": 26, "completion_tokens": 20}


def test_streamed_choices_are_told_apart_by_their_index(drafting: Server) -> None:
    chunks = drafting.stream("/v1/completions", prompt=["abc", "xyz"], n=2, max_tokens=7)
    found = ["", "", "", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            found[choice["index"]] += choice["text"]
    assert found == ["abcabca", "abcabca", "xyzxyzx", "xyzxyzx"]


def test_accepted_drafts_beyond_max_tokens_are_cut(drafting: Server) -> None:
    reply = drafting.complete("abcdefgh", max_tokens=2, return_token_ids=True)
    assert reply["choices"][0]["text"] == "ab"
    assert reply["choices"][0]["token_ids"] == list(b"ab")
    assert reply["usage"]["completion_tokens"] == 2


def test_default_is_16_tokens(server: Server) -> None:
    assert server.complete("ab")["usage"]["completion_tokens"] == 16


def test_huge_max_tokens_is_cut_to_the_context_and_says_length(drafting: Server) -> None:
    for huge in (10**6, 10**30):
        reply = drafting.complete("ab", max_tokens=huge)
        assert reply["usage"]["total_tokens"] == 2048
        assert reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("kind", ["server", "drafting"])
def test_end_token_ends_and_is_not_in_the_text(kind: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(kind)
    prompt = [*b"abc", END, *b"def"]
    [choice] = server.complete(prompt, max_tokens=20, return_token_ids=True)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", None)
    assert choice["token_ids"] == [*b"abc", END]
    [ignored] = server.complete(prompt, max_tokens=7, ignore_eos=True)["choices"]
    assert (ignored["text"], ignored["finish_reason"]) == ("abcdef", "length")
    [shown] = server.complete(prompt, max_tokens=7, ignore_eos=True, skip_special_tokens=False)["choices"]
    assert shown["text"] == "abc<|end|>def"


def test_stop_token_ids(drafting: Server) -> None:
    [choice] = drafting.complete("abcdef", max_tokens=20, stop_token_ids=[ord("d")])["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", ord("d"))
    [shown] = drafting.complete("abcdef", max_tokens=20, stop_token_ids=[ord("d")], include_stop_str_in_output=True)[
        "choices"
    ]
    assert shown["text"] == "abcd"


def test_echo_begins_with_the_prompt(server: Server) -> None:
    assert texts(server.complete("abc", echo=True, max_tokens=2)) == ["abcab"]
    assert texts(server.complete([104, 105], echo=True, max_tokens=2)) == ["hihi"]
    chunks = server.stream("/v1/completions", prompt="abc", echo=True, max_tokens=2)
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "abcab"


def test_id_follows_the_client_s_own(server: Server) -> None:
    assert server.complete("a", request_id="mine")["id"] == "cmpl-mine"
    reply = server.post("/v1/completions", {"prompt": "a"}, {"X-Request-Id": "from-header"})
    assert reply.json["id"] == "cmpl-from-header"


def test_fields_that_ask_for_nothing_are_accepted(server: Server) -> None:
    server.complete(
        "a",
        best_of=1,
        suffix=None,
        logit_bias={},
        presence_penalty=0,
        repetition_penalty=1.0,
        use_beam_search=False,
        response_format={"type": "text"},
        user="somebody",
        logprobs=None,
    )
