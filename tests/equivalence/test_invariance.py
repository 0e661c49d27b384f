# SPDX-License-Identifier: Apache-2.0
"""Each fast path equals the slow one, on tokens: SmolLM2, float32, greedy, against the default settings' output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from paceline.runtime.llm import LLM

Tokens = tuple[int, ...]
Complete = Callable[[LLM, Sequence[Tokens], int], list[Tokens]]
AssertSame = Callable[[Sequence[Tokens], Sequence[Tokens], Sequence[Tokens]], None]
MakeLLM = Callable[..., LLM]

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
COUNT = 32
"""Output tokens compared under each setting."""

FEW = [0, 2, 5, 11, 14, 16, 18, 19]
"""Prompts of the settings that need many steps: conversations, numbers, code, repetition, one token, a paragraph."""


def name(options: dict[str, Any]) -> str:
    return ",".join(f"{key}={'ngram' if isinstance(value, dict) else value}" for key, value in options.items())


def some(of: Sequence[Tokens]) -> list[Tokens]:
    return [of[i] for i in FEW]


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 8},
        {"max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 8192},
        {"speculative_config": NGRAM},
    ],
    ids=name,
)
def test_settings(
    make_llm: MakeLLM,
    prompts: list[Tokens],
    baseline: list[Tokens],
    complete: Complete,
    assert_same: AssertSame,
    options: dict[str, Any],
) -> None:
    llm = make_llm(**options)
    assert_same(prompts, baseline, complete(llm, prompts, COUNT))
    if "speculative_config" in options:
        assert llm.stats().num_accepted_tokens > 0


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 10},
        {"block_size": 5},
        {"speculative_config": NGRAM, "max_num_batched_tokens": 8},
    ],
    ids=name,
)
def test_settings_on_fewer_prompts(
    make_llm: MakeLLM,
    prompts: list[Tokens],
    baseline: list[Tokens],
    complete: Complete,
    assert_same: AssertSame,
    options: dict[str, Any],
) -> None:
    llm = make_llm(**options)
    assert_same(some(prompts), some(baseline), complete(llm, some(prompts), 16))


@pytest.mark.parametrize("speculation", [None, NGRAM], ids=["plain", "ngram"])
def test_prefix_cache_hits(
    make_llm: MakeLLM,
    prompts: list[Tokens],
    baseline: list[Tokens],
    complete: Complete,
    assert_same: AssertSame,
    speculation: dict[str, Any] | None,
) -> None:
    """The second time, every full block but that of the last token is found; in one call, some are while written."""
    llm = make_llm(speculative_config=speculation)
    twice = [*some(prompts), *some(prompts)]
    for _ in range(2):
        assert_same(twice, [*some(baseline), *some(baseline)], complete(llm, twice, 16))
    assert llm.stats().prefix_hits > llm.stats().prefix_queries // 2


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("speculation", [None, NGRAM], ids=["plain", "ngram"])
def test_forced_preemption(
    make_llm: MakeLLM,
    prompts: list[Tokens],
    baseline: list[Tokens],
    complete: Complete,
    assert_same: AssertSame,
    prefix_caching: bool,
    speculation: dict[str, Any] | None,
) -> None:
    """A pool in which one request of full length just fits."""
    llm = make_llm(
        max_model_len=160,
        num_gpu_blocks_override=12,
        enable_prefix_caching=prefix_caching,
        speculative_config=speculation,
    )
    assert_same(some(prompts), some(baseline), complete(llm, some(prompts), COUNT))
    assert llm.stats().preemptions > 0


@pytest.mark.parametrize("pad_resumed", ["off", "running", "resumed"])
def test_padding_modes(
    make_llm: MakeLLM,
    prompts: list[Tokens],
    baseline: list[Tokens],
    complete: Complete,
    assert_same: AssertSame,
    pad_resumed: str,
) -> None:
    """Prompts one token past a block boundary come back with one token to compute, alone and beside others."""
    llm = make_llm(speculative_config=NGRAM | {"pad_resumed": pad_resumed}, max_num_seqs=4)
    full = [p + b for p, b in zip(prompts, baseline, strict=True)]
    cut = [full[i][: 16 * (len(prompts[i]) // 16 + 1) + 1] for i in FEW]
    rest = [full[i][len(c) :] for i, c in zip(FEW, cut, strict=True)]
    for _ in range(2):
        assert_same(cut, rest, complete(llm, cut, 12))
    alone = complete(llm, cut[:1], 12)
    assert_same(cut[:1], rest[:1], alone)
    assert llm.stats().prefix_hits > 0
