# SPDX-License-Identifier: Apache-2.0
"""SmolLM2 in this engine is SmolLM2 in transformers: the same logits, the same greedy tokens, sensible text."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from paceline import SamplingParams
from paceline.execution.attention import PagedAttention, RowSpan
from paceline.execution.kvcache import KVCache
from paceline.models.registry import load_model
from paceline.models.spec import LoadedModel
from paceline.runtime.llm import LLM

NEAR_TIE = 1e-4
Tokens = tuple[int, ...]


def paged_logits(loaded: LoadedModel, ids: Tokens, chunks: list[int]) -> torch.Tensor:
    """Logits of all positions, computed chunk after chunk over the paged cache."""
    model = loaded.model
    blocks = -(-len(ids) // 16)
    cache = KVCache(model.config, blocks + 1, 16, model.dtype)
    table = np.arange(blocks, 0, -1, dtype=np.int64)
    parts, start = [], 0
    with torch.inference_mode():
        for n in chunks:
            attention = PagedAttention(cache, [RowSpan(start, n, table)], model.config.num_heads)
            positions = torch.arange(start, start + n)
            parts.append(model.logits(model.forward(torch.tensor(ids[start : start + n]), positions, attention)))
            start += n
    assert start == len(ids)
    return torch.cat(parts)


@pytest.mark.parametrize("which", [9, 14, 16, 19])
def test_logits_equal_transformers(smollm2: LoadedModel, prompts: list[Tokens], reference: Any, which: int) -> None:
    ids = prompts[which]
    expected = reference.logits(ids)
    last = len(ids) - 1
    for chunks in ([len(ids)], [5, len(ids) - 5], [last, 1], [last - 4, 4, 1]):
        torch.testing.assert_close(paged_logits(smollm2, ids, chunks), expected, atol=1e-4, rtol=0)


def test_greedy_tokens_equal_transformers(prompts: list[Tokens], baseline: list[Tokens], reference: Any) -> None:
    """Twenty prompts, 64 tokens each: every token is the reference's best after the same beginning.

    One pass over prompt and output gives the reference's choice at each place at once. By induction over the
    places, equality at all of them is equality with its greedy decoding.
    """
    assert [len(tokens) for tokens in baseline] == [64] * 20
    for prompt, tokens in zip(prompts, baseline, strict=True):
        logits = reference.logits(prompt + tokens[:-1])[len(prompt) - 1 :]
        best = logits.max(-1)
        for at in (best.indices != torch.tensor(tokens)).nonzero().flatten().tolist():
            margin = float(best.values[at] - logits[at, tokens[at]])
            case = f"prompt {prompt[:8]}..., output token {at}: logits {margin:.2e} apart"
            assert margin <= NEAR_TIE, case
            warnings.warn(f"near-tie: {case}", stacklevel=1)


@pytest.mark.parametrize("which", [5, 17])
def test_greedy_tokens_equal_transformers_decoding_step_by_step(
    prompts: list[Tokens], baseline: list[Tokens], reference: Any, which: int
) -> None:
    tokens, margins = reference.greedy(prompts[which], 64)
    at = next((i for i in range(64) if tokens[i] != baseline[which][i]), 64)
    if at < 64:
        assert margins[at] <= NEAR_TIE
        warnings.warn(f"near-tie: prompt {which}, output token {at}: logits {margins[at]:.2e} apart", stacklevel=1)
    assert at > 0


@pytest.mark.parametrize(
    ("question", "answer"),
    [("What is the capital of France?", "Paris"), ("Who wrote Hamlet?", "Shakespeare"), ("What is 2+2?", "4")],
)
def test_answers_make_sense(make_llm: Callable[..., LLM], question: str, answer: str) -> None:
    """Rotary pairs in the wrong order would still speak fluently, and know nothing."""
    [result] = make_llm().chat(
        [{"role": "user", "content": question}], SamplingParams(temperature=0.0, max_tokens=40), use_tqdm=False
    )
    assert answer in result.outputs[0].text


def test_bfloat16_is_as_close_to_float32_as_the_reference_in_bfloat16(prompts: list[Tokens], reference: Any) -> None:
    ids = prompts[19]
    exact = reference.logits(ids)
    theirs = copy.deepcopy(reference.model).to(torch.bfloat16)
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids]), use_cache=False).logits[0].float()
    got = paged_logits(load_model("smollm2", "bfloat16"), ids, [50, len(ids) - 50])
    assert (got - exact).abs().mean() < 1.5 * (expected - exact).abs().mean()
