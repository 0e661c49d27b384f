# SPDX-License-Identifier: Apache-2.0
"""The prompts of a run: random ones from the core's generator, or those of a file."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.random import default_rng

from paceline.bench.texts import AT_A_TIME, Texts, fit
from paceline.core.config import ConfigError, require
from paceline.core.workload import Job, Workload, generate, generate_warmups, shared_prefix

MIN_TOKENS = 4
MAX_PROMPT_TOKENS = 1024
MAX_TOTAL_TOKENS = 2048
"""Conversations of a ShareGPT file outside these bounds are left out, as ``vllm bench serve`` does."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Text or token ids, and how much is asked for. ``num_tokens``: those that a server counts; 0 if unknown."""

    content: str | list[int]
    num_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Prompts:
    """In the order of their arrivals; the warm-ups are requests of their own."""

    measured: list[Prompt]
    warmups: list[Prompt]


def random_ids(workload: Workload) -> Prompts:
    """The prompts of ``workload`` as ids, each exactly as the simulator has it."""

    def prompt(job: Job) -> Prompt:
        source = job.source(workload.vocab_size)
        return Prompt(list(source.tokens(0, source.length)), source.length, job.output_len)

    return Prompts([prompt(job) for job in generate(workload)], [prompt(job) for job in generate_warmups(workload)])


async def random_texts(workload: Workload, texts: Texts) -> Prompts:
    """The prompts of ``workload`` as text of the same lengths, which leaves out special tokens.

    ``workload`` is for the ids that the text becomes: with a tokenizer that adds special tokens its ``input_len``
    has them subtracted already.
    """
    allowed = [i for i in range(texts.vocab_size) if i not in texts.special_ids]
    # Made to encode to itself once, so that all prompts begin with the same tokens.
    drawn = [allowed[i % len(allowed)] for i in shared_prefix(workload)]
    shared = (await fit(texts, drawn, allowed, default_rng(workload.seed)))[1] if drawn else []

    async def prompt(job: Job, warmup: bool) -> Prompt:
        source = job.source(len(allowed))
        begin = [allowed[i % len(allowed)] for i in job.prefix] if warmup else shared
        body = [allowed[i] for i in source.tokens(len(job.prefix), source.length)]
        text, ids = await fit(texts, begin + body, allowed, default_rng([workload.seed, job.index, warmup]))
        return Prompt(text, len(ids) + texts.num_special, job.output_len)

    return Prompts(
        list(await asyncio.gather(*(prompt(job, False) for job in generate(workload)))),
        list(await asyncio.gather(*(prompt(job, True) for job in generate_warmups(workload)))),
    )


async def sharegpt(
    path: Path, texts: Texts, *, seed: int, num_prompts: int, num_warmups: int, output_len: int | None
) -> Prompts:
    """First turns of the conversations in a ShareGPT JSON file, shuffled by ``seed``.

    ``output_len``: tokens to ask for; None: as many as the second turn has.

    Raises:
        ConfigError: the file is not of that form or has too few fitting conversations for warm-ups of their own.
    """
    raw = _parsed(path, path.read_text(encoding="utf-8"))
    require(isinstance(raw, list), "dataset_path", f"{path}: must hold a JSON list of conversations")
    pairs = [turns for entry in raw if (turns := _two_turns(entry)) is not None]
    random.Random(seed).shuffle(pairs)

    async def prompt(pair: tuple[str, str]) -> Prompt | None:
        question = len(await texts.encode(pair[0], add_special_tokens=True))
        answer = output_len
        if answer is None:
            answer = len(await texts.encode(pair[1], add_special_tokens=True))
        fits = MIN_TOKENS <= question <= MAX_PROMPT_TOKENS and question + answer <= MAX_TOTAL_TOKENS
        if not fits or (output_len is None and answer < MIN_TOKENS):
            return None
        return Prompt(pair[0], question, answer)

    return _divide(await _first(pairs, prompt, num_prompts + num_warmups), path, seed, num_prompts, num_warmups)


async def custom(
    path: Path,
    texts: Texts | None,
    *,
    seed: int,
    num_prompts: int,
    num_warmups: int,
    output_len: int | None,
    templated: bool,
) -> Prompts:
    """The lines of a JSONL file, each with a ``prompt`` and perhaps ``output_tokens``, shuffled by ``seed``.

    ``output_len``: tokens to ask for; None: each line's ``output_tokens``. ``templated``: put the prompt into the
    model's chat template, which needs ``texts``; without them prompts are sent as they are and counted by the server.

    Raises:
        ConfigError: the file is not of that form or has too few lines for warm-ups of their own.
    """
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    entries = []
    for i, line in enumerate(lines):
        entry = _parsed(path, line, f" line {i + 1}")
        where = f"{path} line {i + 1}"
        require(isinstance(entry, dict) and isinstance(entry.get("prompt"), str), "dataset_path",
                f"{where}: must be a JSON object with a text `prompt`")  # fmt: skip
        tokens = entry.get("output_tokens") if output_len is None else output_len
        require(isinstance(tokens, int) and tokens >= 1, "dataset_path",
                f"{where}: `output_tokens` must be an integer of at least 1, or give --custom-output-len")  # fmt: skip
        entries.append((entry["prompt"], tokens))
    random.Random(seed).shuffle(entries)

    async def prompt(entry: tuple[str, int]) -> Prompt:
        text, tokens = entry
        if texts is None:
            return Prompt(text, 0, tokens)
        content = await texts.chat(text) if templated else text
        ids = content if isinstance(content, list) else await texts.encode(content, add_special_tokens=True)
        return Prompt(content, len(ids), tokens)

    return _divide(await _first(entries, prompt, num_prompts + num_warmups), path, seed, num_prompts, num_warmups)


async def _first(entries: Sequence[Any], make: Callable[[Any], Awaitable[Prompt | None]], count: int) -> list[Prompt]:
    """The first ``count`` that ``make`` accepts, or all of them."""
    found: list[Prompt] = []
    for start in range(0, len(entries), AT_A_TIME):
        made = await asyncio.gather(*map(make, entries[start : start + AT_A_TIME]))
        found += [prompt for prompt in made if prompt is not None]
        if len(found) >= count:
            break
    return found[:count]


def _divide(found: list[Prompt], path: Path, seed: int, num_prompts: int, num_warmups: int) -> Prompts:
    """Measured ones first, as in the file's order; too few of them are repeated, warm-ups never."""
    require(bool(found), "dataset_path", f"{path}: no entry can be used")
    require(not num_warmups or len(found) == num_prompts + num_warmups, "num_warmups",
            f"warm-ups are entries of their own, and {path} has {len(found)} that can be used, not"
            f" {num_prompts} + {num_warmups}")  # fmt: skip
    measured, warmups = found[:num_prompts], found[num_prompts:]
    rng = random.Random(seed)
    measured += [rng.choice(found) for _ in range(num_prompts - len(measured))]
    return Prompts(measured, warmups)


def _two_turns(entry: Any) -> tuple[str, str] | None:
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    question, answer = (turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2])
    return (question, answer) if isinstance(question, str) and isinstance(answer, str) else None


def _parsed(path: Path, text: str, where: str = "") -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError("dataset_path", f"{path}{where}: not valid JSON: {error}") from None
