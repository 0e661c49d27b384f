# SPDX-License-Identifier: Apache-2.0
"""Clients that people have, unchanged, against the real model."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from typing import Any

import openai
import pytest

from tests.server.harness import DEADLINE_S, Server

CAPITAL = "The capital of France is"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
REPEAT: Any = [{"role": "user", "content": "Repeat: one two three four five six. one two three four five six."}]
GREEDY: Any = {"model": "smollm2", "temperature": 0}


@pytest.fixture
def client(smollm: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{smollm.base_url}/v1", api_key="sesame", max_retries=0, timeout=DEADLINE_S)


def test_models(client: openai.OpenAI) -> None:
    [card] = client.models.list().data
    assert card.id == "smollm2"
    assert client.models.retrieve("smollm2").id == "smollm2"


def test_completion_streamed_and_whole(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=CAPITAL, max_tokens=12, **GREEDY)
    assert "Paris" in whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    chunks = list(
        client.completions.create(
            prompt=CAPITAL, max_tokens=12, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    # One chunk per token, or more tokens where they piled up.
    assert len(chunks) > 2


def test_chat_streamed_and_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=QUESTION, max_tokens=24, **GREEDY)
    assert "Paris" in (whole.choices[0].message.content or "")
    chunks = list(client.chat.completions.create(messages=QUESTION, max_tokens=24, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_stop_string_and_end_of_turn(client: openai.OpenAI) -> None:
    stopped = client.chat.completions.create(messages=QUESTION, max_tokens=40, stop=["Paris"], **GREEDY)
    assert stopped.choices[0].finish_reason == "stop"
    assert "Paris" not in (stopped.choices[0].message.content or "")
    ended = client.chat.completions.create(messages=QUESTION, max_tokens=200, **GREEDY)
    assert ended.choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in (ended.choices[0].message.content or "")


def test_seed_repeats_and_choices_differ(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        reply = client.completions.create(model="smollm2", prompt="Once upon a time", max_tokens=16, n=3, seed=seed)
        return [choice.text for choice in reply.choices]

    first = texts(7)
    assert texts(7) == first
    assert texts(8) != first
    assert len(set(first)) == 3


def test_token_ids_as_prompts_in_a_batch(client: openai.OpenAI, smollm: Server) -> None:
    headers = {"Authorization": "Bearer sesame"}
    ids = smollm.post("/tokenize", {"prompt": CAPITAL}, headers).json["tokens"]
    by_text = client.completions.create(prompt=CAPITAL, max_tokens=6, **GREEDY).choices[0].text
    reply = client.completions.create(prompt=[ids, ids], max_tokens=6, **GREEDY)
    assert [choice.text for choice in reply.choices] == [by_text, by_text]


def test_errors_are_the_client_s_own_exceptions(client: openai.OpenAI, smollm: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.BadRequestError, match="max_tokens") as refused:
        client.completions.create(model="smollm2", prompt="x", max_tokens=0)
    assert refused.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError, match="8192"):
        client.completions.create(model="smollm2", prompt=[1] * 8192)
    stranger = openai.OpenAI(base_url=f"{smollm.base_url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_many_at_once(smollm: Server) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.completions.create(
            prompt=f"{number}, {number + 1}, {number + 2},", max_tokens=8, stream=True, **GREEDY
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{smollm.base_url}/v1", api_key="sesame", max_retries=0, timeout=DEADLINE_S
        ) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(10, 34)))

    answers = asyncio.run(ask_all())
    right = [str(number + 3) in text for number, text in zip(range(10, 34), answers, strict=True)]
    assert sum(right) > len(right) // 2


def test_stream_that_is_left_frees_its_request(client: openai.OpenAI, smollm: Server) -> None:
    with client.completions.create(prompt=CAPITAL, max_tokens=4000, stream=True, **GREEDY) as stream:
        next(iter(stream))
    smollm.wait_metric("vllm:num_requests_running", 0)
    smollm.wait_metric("vllm:kv_cache_usage_perc", 0)


def test_accepted_drafts_come_several_to_a_chunk(speculating: Server) -> None:
    fields = {"messages": REPEAT, "max_tokens": 40, "temperature": 0, "model": "draft", "return_token_ids": True}
    chunks = speculating.stream("/v1/chat/completions", **fields)
    sizes = [len(c["token_ids"]) for chunk in chunks for c in chunk["choices"] if "token_ids" in c]
    assert max(sizes) > 1
    reply = speculating.post("/v1/chat/completions", fields).json
    assert reply["model"] == "draft"
    assert sum(sizes) == reply["usage"]["completion_tokens"]
    assert speculating.metric("vllm:spec_decode_num_accepted_tokens_total", model_name="small") > 0


def test_context_is_cut_to_what_the_cache_holds(speculating: Server) -> None:
    assert {card["id"] for card in speculating.get("/v1/models").json["data"]} == {"small", "draft"}
    limit = speculating.get("/v1/models").json["data"][0]["max_model_len"]
    assert 100 < limit < 8192
    refused = speculating.post("/v1/completions", {"prompt": [1] * limit})
    assert refused.status == 400
    assert str(limit) in refused.error["message"]
    longest = speculating.complete([1] * (limit - 5), max_tokens=1000, ignore_eos=True)
    assert longest["usage"]["total_tokens"] == limit


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(speculating: Server) -> None:
    body = json.dumps({"prompt": CAPITAL, "max_tokens": 8, "temperature": 0, "stream": True})
    command = ["curl", "--silent", "--fail", "--no-buffer", f"{speculating.base_url}/v1/completions", "--data", body]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout.endswith("data: [DONE]\n\n")
    pieces = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("data: {")]
    assert "Paris" in "".join(piece["choices"][0]["text"] for piece in pieces)
