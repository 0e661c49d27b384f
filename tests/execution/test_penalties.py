# SPDX-License-Identifier: Apache-2.0
"""Biases, masks and penalties: equal to a plain reference, position by position, whatever the batch and the drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.plan import BlockUpdate, NewSequence, Row
from paceline.core.request import SamplingParams, StoredTokens
from paceline.execution.penalties import Adjustments
from paceline.execution.rejection import verify
from paceline.execution.sequence import SequenceState, adjusted

Floats = npt.NDArray[np.float64]
MakeDriver = Callable[..., Any]


def reference(
    logits: Floats, prompt: Sequence[int], output: Sequence[int], params: SamplingParams, stop_ids: set[int]
) -> Floats:
    """The rules, token by token."""
    changed = logits.copy()
    for token, bias in (params.logit_bias or {}).items():
        changed[token] += bias
    for token in range(len(logits)):
        count = list(output).count(token)
        if token in stop_ids and len(output) < params.min_tokens:
            changed[token] = -np.inf
        if token in prompt or count:
            above = changed[token] > 0
            changed[token] *= 1 / params.repetition_penalty if above else params.repetition_penalty
        changed[token] -= params.frequency_penalty * count
        changed[token] -= params.presence_penalty * (count > 0)
    return changed


TOKENS = st.lists(st.integers(0, 9), max_size=8)
PENALTY = st.floats(-2, 2, width=32)


@settings(deadline=None)
@given(
    TOKENS,
    TOKENS,
    PENALTY,
    PENALTY,
    st.floats(0.25, 4, width=32),
    st.integers(0, 9),
    st.dictionaries(st.integers(0, 9), st.floats(-100, 100, width=32), max_size=4),
    st.sets(st.integers(0, 9), max_size=3),
    st.integers(0, 2**31),
)
def test_every_combination_equals_the_reference(
    prompt: list[int],
    output: list[int],
    presence: float,
    frequency: float,
    repetition: float,
    min_tokens: int,
    bias: dict[int, float],
    stop_ids: set[int],
    seed: int,
) -> None:
    params = SamplingParams(
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        min_tokens=min_tokens,
        logit_bias=bias,
    )
    logits = torch.randn(10, generator=torch.Generator().manual_seed(seed)) * 3
    expected = reference(logits.double().numpy(), prompt, output, params, stop_ids)
    adjustments = Adjustments.of(params, stop_ids)
    if adjustments is not None:
        # Twice: what is remembered of the prompt must not change the result.
        for _ in range(2):
            found = logits.clone()
            adjustments.apply(found, np.array(prompt, dtype=np.int64), np.array(output, dtype=np.int64))
    else:
        found = logits
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=1e-4, atol=1e-4)


def test_requests_without_these_options_are_not_touched() -> None:
    assert Adjustments.of(SamplingParams(top_k=3, top_p=0.5, min_p=0.1, logprobs=2), {1}) is None
    assert Adjustments.of(SamplingParams(min_tokens=4), set()) is None
    state = SequenceState(NewSequence(0, "0", StoredTokens([1, 2]), SamplingParams()), 0)
    logits = torch.randn(2, 4)
    assert adjusted(logits, [state.verification(0, (1,))], [state]) is logits


def test_each_position_counts_the_drafts_before_it_and_no_other() -> None:
    params = SamplingParams(
        presence_penalty=0.5, frequency_penalty=1.0, repetition_penalty=1.5, min_tokens=3, max_tokens=9
    )
    state = SequenceState(NewSequence(0, "0", StoredTokens([3, 4]), params, frozenset({9})), 0)
    state.append([5])
    other = SequenceState(NewSequence(1, "1", StoredTokens([1]), SamplingParams()), 0)
    drafts = (5, 3, 7)
    logits = torch.randn(7, 10)
    before = logits.clone()
    rows = [other.verification(0, (2,)), state.verification(2, (*drafts, -1))]
    found = adjusted(logits, rows, [other, state])
    for j in range(4):
        want = reference(logits[2 + j].double().numpy(), [3, 4], [5, *drafts[:j]], params, {9})
        np.testing.assert_allclose(found[2 + j].double().numpy(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[:2], logits[:2])
    assert torch.equal(logits, before)


V = 4
TABLE = torch.randn(V, V, generator=torch.Generator().manual_seed(8)) * 1.2
"""A model whose logits depend on the token before."""


def nucleus(p: Floats, top_k: int, top_p: float) -> Floats:
    """Cut by sorting, one token at a time."""
    ranked = sorted(range(V), key=lambda t: -p[t])[: top_k or V]
    total, kept, mass = sum(p[t] for t in ranked), [], 0.0
    for token in ranked:
        kept.append(token)
        mass += p[token] / total
        if mass >= top_p:
            break
    cut = np.array([p[t] if t in kept else 0.0 for t in range(V)])
    return cut / cut.sum()


def exact(params: SamplingParams, prompt: list[int], length: int) -> dict[tuple[int, ...], float]:
    """Probability of each output, token by token, without any speculation."""
    result = {}
    for output in product(range(V), repeat=length):
        probability = 1.0
        for i, token in enumerate(output):
            previous = [*prompt, *output[:i]]
            logits = reference(TABLE[previous[-1]].double().numpy(), prompt, output[:i], params, {0})
            weights = np.exp((logits - logits.max()) / params.temperature)
            probability *= nucleus(weights / weights.sum(), params.top_k, params.top_p)[token]
        result[output] = probability
    return result


@pytest.mark.parametrize("drafts", [(), (2, 1), (0, 3), (1, -1)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.8},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
        {"top_k": 3, "top_p": 0.85, "frequency_penalty": 1.5, "min_tokens": 2, "logit_bias": {1: 0.7}},
    ],
    ids=lambda o: ",".join(o),
)
def test_verification_is_lossless_for_the_distribution_that_was_asked_for(
    options: dict[str, Any], drafts: tuple[int, ...]
) -> None:
    """Three tokens of many sequences: drafts verified, the rest drawn one by one; the triples follow the reference."""
    params, prompt, length, count = SamplingParams(temperature=0.9, **options), [1, 2], 3, 3000
    states = []
    for seed in range(count):
        seeded = SamplingParams(temperature=0.9, seed=seed, **options)
        states.append(SequenceState(NewSequence(seed, str(seed), StoredTokens(prompt), seeded, frozenset({0})), 0))
    first = True
    while rows := [state for state in states if state.num_output < length]:
        step = drafts if first else ()
        first = False
        logits = TABLE[[max(t, 0) for s in rows for t in (s.tokens[-1], *step)]]
        checks = [s.verification(i * (len(step) + 1), step) for i, s in enumerate(rows)]
        changed = adjusted(logits, checks, rows)
        for state, tokens in zip(rows, verify(changed, changed.argmax(-1).tolist(), checks), strict=True):
            state.append(tokens)
    found = Counter(tuple(state.tokens[2 : 2 + length].tolist()) for state in states)
    expected = exact(params, prompt, length)
    assert all(expected[output] > 0 for output in found)
    cells = [(found[o], p * count) for o, p in expected.items() if p * count >= 8]
    statistic = sum((n - e) ** 2 / e for n, e in cells)
    degrees = len(cells) - 1
    # Wilson and Hilferty's approximation: exceeded about once in 2000.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.3 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert statistic < limit


PROMPT = [(5 * i * i + 3) % 64 for i in range(30)]
COUNT = 12
EVERYTHING = {"presence_penalty": 0.8, "frequency_penalty": 0.6, "repetition_penalty": 1.4, "logit_bias": {7: 2.0}}
PARAMS: list[dict[str, Any]] = [
    EVERYTHING,
    EVERYTHING | {"temperature": 1.3, "seed": 5, "top_p": 0.9, "top_k": 30, "min_p": 0.001},
]
MODES = pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])


def alone(make_driver: MakeDriver, params: dict[str, Any]) -> list[int]:
    driver = make_driver()
    driver.add(0, PROMPT, **params)
    tokens: list[int] = driver.generate(0, len(PROMPT), COUNT)
    return tokens


@MODES
def test_chunks_company_and_preemption_change_nothing(make_driver: MakeDriver, params: dict[str, Any]) -> None:
    driver = make_driver()
    blocks = driver.add(0, PROMPT, **params)
    driver.add(1, PROMPT[:9], temperature=1.0, seed=1, top_k=5, presence_penalty=1.0)
    driver.run(Row(0, 0, 13, (), False), Row(1, 0, 9, (), True))
    tokens = list(driver.run(Row(1, 9, 1, (), True), Row(0, 13, 17, (), True)).sampled[1])
    for i in range(4):
        tokens += driver.run(Row(0, 30 + i, 1, (), True), Row(1, 10 + i, 1, (), True)).sampled[0]
    # It comes back with other blocks, and a token that was sampled but never committed is forgotten.
    driver.run(Row(0, 34, 1, (), True))
    driver.blocks.append(BlockUpdate(0, 0, True, blocks[:2]))
    driver.assign(0, 60, replace=False)
    tokens += driver.run(Row(0, 8, 27, (), True)).sampled[0]
    while len(tokens) < COUNT:
        tokens += driver.run(Row(0, 29 + len(tokens), 1, (), True)).sampled[0]
    assert tokens == alone(make_driver, params)
    assert tokens != alone(make_driver, {k: v for k, v in params.items() if k not in EVERYTHING})


def test_greedy_drafts_are_accepted_exactly_where_the_penalised_model_says_them(make_driver: MakeDriver) -> None:
    expected = alone(make_driver, EVERYTHING)
    driver = make_driver(num_speculative_tokens=3)
    driver.add(0, PROMPT, **EVERYTHING)
    tokens = list(driver.run(Row(0, 0, len(PROMPT), (), True)).sampled[0])
    for wrong in (None, 1, None):
        drafts = list(expected[len(tokens) : len(tokens) + 3])
        if wrong is not None:
            drafts[wrong] = (drafts[wrong] + 1) % 64
        sampled = driver.run(Row(0, 29 + len(tokens), 4, tuple(drafts), True)).sampled[0]
        assert len(sampled) == (4 if wrong is None else wrong + 1)
        tokens += sampled
    assert tokens == expected[: len(tokens)]


def test_a_row_that_may_say_nothing_is_an_error_of_its_own(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add(0, PROMPT, min_tokens=2, stop_token_ids=tuple(range(64)), logprobs=1)
    driver.first[0] = NewSequence(0, "0", driver.first[0].source, driver.first[0].params, frozenset(range(64)))
    driver.add(1, PROMPT)
    result = driver.run(Row(0, 0, 30, (), True), Row(1, 0, 30, (), True))
    assert result.sampled[0] == ()
    assert list(result.errors) == [0]
    assert len(result.sampled[1]) == 1
