# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities are those of the model itself, whatever is done to its distribution, with drafts and without."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from paceline.core.plan import Row, TokenLogprobs
from paceline.execution.logprobs import Scoring, score
from paceline.models.llama import Llama

PROMPT = [(5 * i * i + 3) % 64 for i in range(30)]
MakeDriver = Callable[..., Any]
SHAPES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def theirs() -> Any:
    """transformers' model of the small configuration, with weights that depend on their names alone."""
    config = transformers.LlamaConfig(
        **SHAPES,
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
    )
    reference = transformers.LlamaForCausalLM(config).eval()
    for name, weight in reference.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.4 + (weight.ndim == 1))
    return reference


@pytest.fixture(scope="module")
def reference() -> Any:
    return theirs()


@pytest.fixture(scope="module")
def same(model: Llama, reference: Any) -> Llama:
    """The same weights in this engine."""
    weights = dict(reference.named_parameters())
    return Llama(model.config, torch.float32, lambda name: weights[name].data)


def expected(reference: Any, tokens: list[int]) -> torch.Tensor:
    """[vocabulary] log-probabilities of what follows ``tokens``."""
    with torch.no_grad():
        return torch.log_softmax(reference(torch.tensor([tokens])).logits[0, -1].double(), -1)


def check(reference: Any, before: list[int], entry: TokenLogprobs, num_top: int) -> None:
    want = expected(reference, before)
    assert entry.logprob == pytest.approx(float(want[entry.token_id]), abs=1e-4)
    assert entry.rank == 1 + int((want > want[entry.token_id]).sum())
    best = want.topk(num_top)
    assert [token for token, _ in entry.top] == best.indices.tolist()
    assert [logprob for _, logprob in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


PENALISED = {"presence_penalty": 1.0, "repetition_penalty": 1.5, "logit_bias": {3: 5.0}}


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5, "seed": 6, "top_k": 9, "top_p": 0.8, "min_p": 0.01},
        PENALISED,
        {"temperature": 0.5, "seed": 3} | PENALISED,
    ],
    ids=["greedy", "filtered", "penalised", "both"],
)
def test_equal_to_transformers_with_and_without_drafts(
    make_driver: MakeDriver, reference: Any, same: Llama, params: dict[str, Any]
) -> None:
    driver = make_driver(model=same)
    driver.add(0, PROMPT, **params)
    plain = driver.generate(0, len(PROMPT), 9)

    driver = make_driver(model=same, num_speculative_tokens=3)
    driver.add(0, PROMPT, logprobs=4, **params)
    driver.add(1, PROMPT[:7], temperature=1.0, seed=9, logprobs=0)
    driver.add(2, PROMPT[:5])
    rows = [Row(1, 0, 7, (), True), Row(0, 0, len(PROMPT), (), True), Row(2, 0, 5, (), True)]
    tokens: list[int] = []
    taken = []
    for wrong in (None, None, 1, 0, None):
        result = driver.run(*rows)
        assert result.logprobs[2:] == ([None] if len(rows) == 3 else [])
        assert [entry.top for entry in result.logprobs[0]] == [()] * len(result.sampled[0])
        assert tuple(entry.token_id for entry in result.logprobs[1]) == result.sampled[1]
        for token, entry in zip(result.sampled[1], result.logprobs[1], strict=True):
            check(reference, PROMPT + tokens, entry, 4)
            tokens.append(token)
        taken.append(len(result.sampled[1]))
        drafts = (plain + [0] * 9)[len(tokens) : len(tokens) + 3]
        if wrong is not None:
            drafts[wrong] = (drafts[wrong] + 1) % 64
        start = len(PROMPT) + len(tokens) - 1
        rows = [Row(1, 6 + len(taken), 1, (), True), Row(0, start, 4, tuple(drafts), True)]
    assert tokens[:9] == plain[: len(tokens)] or params.get("temperature")
    assert max(taken) > 1


def test_nobody_asked(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add(0, PROMPT)
    assert driver.run(Row(0, 0, len(PROMPT), (), True)).logprobs is None


def test_rows_are_scored_alike_alone_and_together() -> None:
    """Also where logits are equal."""
    logits = torch.randint(0, 4, (6, 50), generator=torch.Generator().manual_seed(1)).float()
    rows = [Scoring(0, (1, 2), 3), Scoring(2, (7,), 0), Scoring(3, (0, 4), 20), Scoring(5, (9,), 3)]
    together = score(logits, rows)
    assert together == [score(logits, [row])[0] for row in rows]
    assert [len(entries) for entries in together] == [2, 1, 2, 1]
    [(entry,)] = score(logits, [Scoring(0, (1,), -1)])
    assert len(entry.top) == 50
    assert sum(torch.tensor([logprob for _, logprob in entry.top]).exp()) == pytest.approx(1.0, abs=1e-5)
