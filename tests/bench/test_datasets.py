# SPDX-License-Identifier: Apache-2.0
"""Prompts: those of the core's generator whatever their form, and those of files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.client import Client, ServerUnavailable
from paceline.bench.datasets import Prompts, custom, random_ids, random_texts, sharegpt
from paceline.bench.texts import LocalTexts, ServerTexts, Texts
from paceline.core.config import ConfigError
from paceline.core.workload import Workload, generate, generate_warmups
from tests.bench.scripted import START, ScriptedServer, scripted

WORKLOAD = Workload(
    input_len=20, output_len=10, range_ratio=0.5, prefix_len=6, num_prompts=40, num_warmups=5, seed=11, vocab_size=300
)


class Letters:
    """A tokenizer that merges: "ab" is one token, so decoding and encoding again can shorten a prompt."""

    vocab_size = 28
    special_ids = frozenset({27})
    num_special = 1

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = [27] if add_special_tokens else []
        for part in text.split("ab"):
            ids += [ord(c) - ord("a") for c in part] + [26]
        return ids[:-1]

    def decode(self, ids: list[int]) -> str:
        assert 27 not in ids, "a special token is in a random prompt"
        return "".join("ab" if i == 26 else chr(ord("a") + i) for i in ids)

    def chat(self, text: str) -> str:
        return f"user{text}"


def wanted(workload: Workload) -> list[tuple[int, int]]:
    """(prompt tokens, output tokens) of the core's generator."""
    return [(job.prompt_len, job.output_len) for job in generate(workload)]


def lengths(prompts: Prompts) -> list[tuple[int, int]]:
    return [(prompt.num_tokens, prompt.max_tokens) for prompt in prompts.measured]


def asking(server: ScriptedServer, make: Callable[[ServerTexts], Coroutine[Any, Any, Prompts]]) -> Prompts:
    """Prompts made with the server's tokenizer, whose tokens are bytes."""

    async def run() -> Prompts:
        async with asyncio.timeout(60), Client(server.base_url, "/v1/completions") as client:
            return await make(await ServerTexts.of(client, "scripted", 128))

    return asyncio.run(run())


def test_ids_are_those_of_the_core_s_generator() -> None:
    prompts = random_ids(WORKLOAD)
    for made, jobs in ((prompts.measured, generate(WORKLOAD)), (prompts.warmups, generate_warmups(WORKLOAD))):
        assert [prompt.content for prompt in made] == [list(job.source(300).tokens(0, job.prompt_len)) for job in jobs]
    assert lengths(prompts) == wanted(WORKLOAD)


def test_texts_have_the_lengths_of_the_core_s_generator_and_one_prefix() -> None:
    tokenizer = Letters()
    workload = Workload(input_len=30, range_ratio=0.3, prefix_len=8, num_prompts=50, num_warmups=3, seed=3,
                        vocab_size=tokenizer.vocab_size)  # fmt: skip
    prompts = asyncio.run(random_texts(workload, LocalTexts(tokenizer, None)))
    assert lengths(prompts) == [(n + tokenizer.num_special, out) for n, out in wanted(workload)]
    ids = [tokenizer.encode(str(p.content), add_special_tokens=False) for p in prompts.measured]
    assert [len(i) for i in ids] == [n for n, _ in wanted(workload)]
    assert len({tuple(i[:7]) for i in ids}) == 1
    assert {tuple(i[:7]) for i in ids}.isdisjoint(
        tuple(tokenizer.encode(str(p.content), add_special_tokens=False)[:7]) for p in prompts.warmups
    )
    assert prompts == asyncio.run(random_texts(workload, LocalTexts(tokenizer, None)))


def test_the_server_s_tokenizer_makes_texts_of_the_same_lengths() -> None:
    workload = Workload(input_len=12, range_ratio=0.5, num_prompts=30, num_warmups=2, vocab_size=128)
    with scripted() as server:
        prompts = asking(server, lambda texts: random_texts(workload, texts))
    assert lengths(prompts) == [(n + 1, out) for n, out in wanted(workload)]
    assert [len(str(p.content).encode()) for p in prompts.measured] == [n for n, _ in wanted(workload)]
    assert len(prompts.warmups) == 2


def test_a_server_without_a_tokenizer_is_refused_with_the_ways_out() -> None:
    with scripted(ScriptedServer(tokenizes=False)) as server, pytest.raises(ServerUnavailable) as refused:
        asking(server, lambda texts: random_texts(WORKLOAD, texts))
    assert "--tokenizer" in str(refused.value)
    assert "--prompt-token-ids" in str(refused.value)


# -- Files ---------------------------------------------------------------------------------------------------


def local() -> Texts:
    return LocalTexts(Letters(), None)


def conversation(*turns: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": turn} for turn in turns]}


def test_sharegpt_takes_fitting_first_turns_in_an_order_that_the_seed_decides(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    good = [conversation("q" * (4 + i), "x" * (5 + i)) for i in range(30)]
    bad = [conversation("onlyone"), {"id": 3}, conversation("q", "toolong" * 9), conversation("q" * 1500, "x" * 9),
           conversation("q" * 9, "x")]  # fmt: skip
    path.write_text(json.dumps([*good, *bad]))

    def take(seed: int, n: int, **options: Any) -> Prompts:
        return asyncio.run(
            sharegpt(path, local(), seed=seed, num_prompts=n, num_warmups=options.pop("warmups", 0), output_len=None)
        )

    first = take(1, 30)
    # One special token in front of each text.
    assert sorted(lengths(first)) == [(5 + i, 6 + i) for i in range(30)]
    assert lengths(first) != sorted(lengths(first))
    assert take(1, 30) == first
    assert take(2, 30) != first
    assert take(1, 5).measured == first.measured[:5]
    with_warmups = take(1, 26, warmups=4)
    assert with_warmups.measured + with_warmups.warmups == first.measured
    repeated = take(1, 35)
    assert repeated.measured[:30] == first.measured
    assert all(prompt in first.measured for prompt in repeated.measured[30:])
    with pytest.raises(ConfigError, match="num_warmups"):
        take(1, 30, warmups=1)


def test_sharegpt_with_an_output_length_of_one_s_own(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps([conversation("question", "a")]))
    made = asyncio.run(sharegpt(path, local(), seed=0, num_prompts=1, num_warmups=0, output_len=2))
    assert lengths(made) == [(9, 2)]


def custom_file(folder: Path) -> Path:
    path = folder / "c.jsonl"
    lines = [{"prompt": "x" * n, "output_tokens": n} for n in (1, 2, 3)]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return path


@pytest.mark.parametrize(
    ("texts", "templated", "tokens"), [(local(), True, [6, 7, 8]), (local(), False, [2, 3, 4]), (None, False, [0] * 3)]
)
def test_custom_lines(tmp_path: Path, texts: Texts | None, templated: bool, tokens: list[int]) -> None:
    made = asyncio.run(
        custom(custom_file(tmp_path), texts, seed=0, num_prompts=3, num_warmups=0, output_len=None, templated=templated)
    )
    assert sorted(lengths(made)) == list(zip(tokens, [1, 2, 3], strict=True))
    assert all(str(prompt.content).startswith("user") == templated for prompt in made.measured)


def test_custom_in_the_server_s_chat_template_is_sent_as_its_tokens(tmp_path: Path) -> None:
    path = custom_file(tmp_path)
    with scripted() as server:
        made = asking(server, lambda texts: custom(path, texts, seed=0, num_prompts=2, num_warmups=1, output_len=7,
                                                   templated=True))  # fmt: skip
    every = [*made.measured, *made.warmups]
    assert sorted(len(prompt.content) for prompt in every) == [8, 9, 10]
    assert {prompt.max_tokens for prompt in every} == {7}
    assert all(prompt.content[0] == START for prompt in every)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{broken", "line 1: not valid JSON"),
        ('{"prompt": "x", "output_tokens": 1}\n{"text": "y"}', "line 2"),
        ('{"prompt": "x"}', "--custom-output-len"),
        ('{"prompt": "x", "output_tokens": 0}', "output_tokens"),
        ("\n", "no entry"),
    ],
)
def test_bad_custom_files_are_refused_with_the_place(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        asyncio.run(custom(path, None, seed=0, num_prompts=1, num_warmups=0, output_len=None, templated=False))
    assert error.value.field == "dataset_path"
    assert says in str(error.value)


@pytest.mark.parametrize("text", ["{", '{"a": 1}', '[{"conversations": []}]'])
def test_bad_sharegpt_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="dataset_path"):
        asyncio.run(sharegpt(path, local(), seed=0, num_prompts=1, num_warmups=0, output_len=None))
