# SPDX-License-Identifier: Apache-2.0
"""Refusals: each names the field, and says what to do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.harness import Server, fake_server

COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(
    "body", [b"{", b"", b"\xff", b'{"prompt": "\\ud800"}', b"[" * 5000, b'{"prompt": NaN}', b"nul"]
)
def test_bad_json(server: Server, body: bytes) -> None:
    reply = server.post(COMPLETIONS, body)
    assert reply.status == 400
    assert "JSON" in reply.error["message"]


@pytest.mark.parametrize("body", [[], "x", 3, None, True])
def test_json_that_is_no_object(server: Server, body: Any) -> None:
    reply = server.post(COMPLETIONS, body)
    assert reply.status == 400
    assert "object" in reply.error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "7"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop_token_ids": [100000]}, "stop_token_ids"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logprobs": 21}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": True}}, "stream_options.other"),
        ({"stream": "yes"}, "stream"),
        ({"priority": 1}, "priority"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"temprature": 0.5}, "temprature"),
        ({"messages": []}, "messages"),
    ],
)
def test_field_at_fault_is_named(server: Server, fields: dict[str, Any], param: str) -> None:
    reply = server.post(COMPLETIONS, {"prompt": "abc", **fields})
    assert reply.status == 400
    assert reply.error["param"] == param
    assert param.split("[")[0] in reply.error["message"]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([[]], "prompt"),
        ([[1], []], "prompt[1]"),
        (None, "prompt"),
        (3, "prompt"),
        ([1, "a"], "prompt"),
        ([-1], "prompt[0]"),
        ([261], "prompt"),
        ([[1], [1, 2, 261]], "prompt[1]"),
        ([2**40], "prompt[0]"),
        ([1.5], "prompt[0]"),
        ("a" * 2048, "prompt"),
        (["a", "a" * 3000], "prompt[1]"),
        ({"text": "a"}, "prompt"),
    ],
)
def test_prompt_that_cannot_be_completed(server: Server, prompt: Any, param: str) -> None:
    reply = server.post(COMPLETIONS, {"prompt": prompt})
    assert reply.status == 400
    assert reply.error["param"] == param


def test_prompt_of_the_whole_context_is_refused_and_one_less_is_not(server: Server) -> None:
    assert server.post(COMPLETIONS, {"prompt": "a" * 2048}).status == 400
    assert server.complete("a" * 2047)["usage"]["completion_tokens"] == 1


def test_five_over_long_prompts_in_a_row_harm_nobody(server: Server) -> None:
    for _ in range(5):
        assert server.post(COMPLETIONS, {"prompt": "a" * 5000}).status == 400
    assert server.complete("ab", max_tokens=1)["choices"][0]["text"] == "a"


def test_completions_beyond_number_are_refused(server: Server) -> None:
    reply = server.post(COMPLETIONS, {"prompt": ["a"] * 100, "n": 100})
    assert reply.status == 400
    assert reply.error["param"] == "n"


def test_echo_with_logprobs_is_refused(server: Server) -> None:
    assert server.post(COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1}).error["param"] == "echo"


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_unknown_model(server: Server, path: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    fields = {"/detokenize": {"tokens": [1]}, "/v1/chat/completions": {"messages": messages}}
    reply = server.post(path, {"model": "gpt-9", **fields.get(path, {"prompt": "x"})})
    assert reply.status == 404
    assert reply.error["param"] == "model"
    assert "fake" in reply.error["message"]


def test_unknown_path_and_method(server: Server) -> None:
    assert "/v1/embeddings" in server.post("/v1/embeddings", {}).error["message"]
    assert server.get("/v1/embeddings").status == 404
    reply = server.get(COMPLETIONS)
    assert reply.status == 405
    assert "GET" in reply.error["message"]
    assert server.get("/v1/models/other").status == 404


def test_rank_of_a_server_with_one_rank(server: Server) -> None:
    for rank, status in (("0", 200), ("1", 400), ("-1", 400), ("first", 400)):
        assert server.post(COMPLETIONS, {"prompt": "a"}, {"X-Data-Parallel-Rank": rank}).status == status


def test_key() -> None:
    with fake_server(api_keys=["first", "second"]) as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first"}, {"Authorization": "Bearer"}):
            for path in (COMPLETIONS, "/tokenize", "/nowhere"):
                reply = server.post(path, {"prompt": "a"}, headers)
                assert reply.status == 401
                assert "Authorization" in reply.error["message"]
        for key in ("first", "second"):
            assert server.post(COMPLETIONS, {"prompt": "a"}, {"Authorization": f"Bearer {key}"}).status == 200
        for path in ("/health", "/metrics", "/version", "/openapi.json"):
            assert server.get(path).status == 200


def test_full_queue() -> None:
    with fake_server({"step_s": 0.05}, max_num_queued_reqs=2, names=["served"]) as server:
        first = server.connection()
        first.request("POST", COMPLETIONS, b'{"prompt": "a", "n": 2, "max_tokens": 2000, "stream": true}')
        assert first.getresponse().status == 200
        reply = server.post(COMPLETIONS, {"prompt": "a"})
        assert reply.status == 503
        assert int(reply.headers["retry-after"]) >= 1
        assert "--max-num-queued-reqs" in reply.error["message"]
        assert server.metric("vllm:admission_rejections_total", reason="max_num_queued_reqs") == 1
        first.close()
        server.wait_metric("vllm:num_requests_running", 0)
        assert server.complete("a", max_tokens=1)["model"] == "served"
