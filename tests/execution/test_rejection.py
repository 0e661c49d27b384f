# SPDX-License-Identifier: Apache-2.0
"""Verification of drafts: exact under greedy decoding, lossless under sampling, at given rates when synthetic."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.execution.rejection import Verification, verify
from paceline.execution.sampler import Filters, Purpose, draw, filtered, uniform

VOCABULARY = 5


def run(
    logits: torch.Tensor,
    drafts: tuple[int, ...],
    *,
    temperature: float = 0.0,
    seed: int = 0,
    q: torch.Tensor | None = None,
    synthetic: tuple[float, ...] | None = None,
) -> tuple[int, ...]:
    row = Verification(0, drafts, temperature, seed, 0, q)
    return verify(logits, logits.argmax(-1).tolist(), [row], synthetic)[0]


def one_hot(*tokens: int) -> torch.Tensor:
    """Logits whose argmax at each position is as given."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCABULARY).float() * 9


@pytest.mark.parametrize(
    ("best", "drafts", "expected"),
    [
        ((1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 4)),
        ((1, 2, 3, 4), (1, 2, 4), (1, 2, 3)),
        ((1, 2, 3, 4), (2, 2, 3), (1,)),
        ((1,), (), (1,)),
        ((1, 2, 3), (1, -1), (1, 2)),
    ],
)
def test_greedy_accepts_the_longest_prefix_that_the_model_would_say(
    best: tuple[int, ...], drafts: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert run(one_hot(*best), drafts) == expected


@pytest.mark.parametrize("num_drafts", [1, 3, 6])
@pytest.mark.parametrize("argmax", [0, VOCABULARY - 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rates", [None, 1.0])
def test_placeholders_are_rejected_in_every_mode(
    num_drafts: int, argmax: int, temperature: float, rates: float | None
) -> None:
    """-1 would index the last entry of a distribution; and a target that always says 0 must not accept it as 0."""
    logits = one_hot(*[argmax] * (num_drafts + 1)) * 100
    synthetic = None if rates is None else (rates,) * num_drafts
    for seed in range(20):
        drafts = (-1,) * num_drafts
        assert run(logits, drafts, temperature=temperature, seed=seed, synthetic=synthetic) == (argmax,)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_placeholders_after_drafts_end_the_acceptance(temperature: float) -> None:
    logits = one_hot(3, 4, 2, 1) * 100
    assert run(logits, (3, -1, -1), temperature=temperature) == (3, 4)
    assert run(logits, (3, -1, -1), temperature=temperature, synthetic=(1.0, 1.0, 1.0)) == (3, 4)


def test_rows_are_verified_alike_alone_and_together() -> None:
    generator = torch.Generator().manual_seed(5)
    rows, parts, first = [], [], 0
    for i, drafts in enumerate([(1, 2), (), (0, 0, 4), (-1, -1), (2,)]):
        rows.append(Verification(first, drafts, 0.7 * (i % 2), i, 10 * i))
        parts.append(torch.randn(len(drafts) + 1, VOCABULARY, generator=generator))
        first += len(drafts) + 1
    logits = torch.cat(parts)
    together = verify(logits, logits.argmax(-1).tolist(), rows)
    for row, part, expected in zip(rows, parts, together, strict=True):
        alone = Verification(0, row.drafts, row.temperature, row.seed, row.position)
        assert verify(part, part.argmax(-1).tolist(), [alone]) == [expected]


def chi_square(found: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Pearson's statistic; cells with few expected counts are pooled."""
    total = sum(found.values())
    rest_found, rest_expected, statistic = 0.0, 0.0, 0.0
    for outcome, p in expected.items():
        if p * total < 10:
            rest_found, rest_expected = rest_found + found[outcome], rest_expected + p * total
        else:
            statistic += (found[outcome] - p * total) ** 2 / (p * total)
    return statistic + ((rest_found - rest_expected) ** 2 / rest_expected if rest_expected >= 1 else 0.0)


def pairs(p: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Probability of each first two tokens; the second position's distribution does not depend on the first."""
    return {(a, b): float(p[0, a] * p[1, b]) for a in range(VOCABULARY) for b in range(VOCABULARY)}


@pytest.mark.parametrize("drafter", ["one-hot", "good", "bad", "equal"])
def test_two_tokens_follow_the_target_distribution(drafter: str) -> None:
    """Draft one token, verify, and if it was rejected draw the second without drafts: the pair must follow p."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, VOCABULARY, generator=generator)
    p = torch.softmax(logits, -1)
    noise = {"good": 0.3, "bad": 3.0, "equal": 0.0}.get(drafter, 0.0)
    q = torch.softmax(logits[:1] + noise * torch.randn(1, VOCABULARY, generator=generator), -1)
    count = 10_000
    found: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for seed in range(count):
        draft = 2 if drafter == "one-hot" else draw(q, [uniform(seed + 10**6, 0, Purpose.SAMPLE)])[0]
        tokens = run(logits, (draft,), temperature=1.0, seed=seed, q=None if drafter == "one-hot" else q)
        if len(tokens) == 1:
            second = Verification(0, (), 1.0, seed, 1)
            tokens += verify(logits[1:], [0], [second])[0]
        else:
            accepted += 1
        found[tokens] += 1
    assert chi_square(found, pairs(p)) < 51.2  # 24 degrees of freedom: exceeded once in 1000
    overlap = float(p[0, 2]) if drafter == "one-hot" else float(torch.minimum(p[0], q[0]).sum())
    assert abs(accepted / count - overlap) < 4 * (0.25 / count) ** 0.5


def test_temperature_shapes_the_target() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5], [0.0, 0.0, 0.0, 0.0, 0.0]])
    count, p = 8000, torch.softmax(logits / 0.6, -1)
    found = Counter(run(logits, (1,), temperature=0.6, seed=s)[:1] for s in range(count))
    assert chi_square(found, {(a,): float(p[0, a]) for a in range(VOCABULARY)}) < 18.5  # 4 degrees, 1 in 1000


def test_synthetic_acceptance_follows_the_rates() -> None:
    """r = (0.8, 0.4, 0.1): c = (0.8, 0.5, 0.25), whatever the model says."""
    count, logits = 6000, one_hot(0, 1, 2, 3)
    lengths = Counter(len(run(logits, (4, 4, 4), seed=s, synthetic=(0.8, 0.5, 0.25))) - 1 for s in range(count))
    for i, rate in enumerate((0.8, 0.4, 0.1)):
        share = sum(n for length, n in lengths.items() if length > i) / count
        assert abs(share - rate) < 4 * (0.25 / count) ** 0.5


@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=4), st.booleans())
def test_synthetic_rates_of_one_and_zero_are_certain(drafts: list[int], accept: bool) -> None:
    logits = one_hot(*[1] * (len(drafts) + 1))
    got = run(logits, tuple(drafts), synthetic=(float(accept),) * len(drafts))
    assert got == ((*drafts, 1) if accept else (1,))


@pytest.mark.parametrize("filters", [Filters(top_p=0.7), Filters(top_k=2), Filters(min_p=0.4), Filters(0.1, 4, 0.9)])
@pytest.mark.parametrize("drafts", [(), (2,), (0,)])
def test_sampled_tokens_follow_the_filtered_distribution(filters: Filters, drafts: tuple[int, ...]) -> None:
    """With a draft that is likely, with one that the filters may exclude, and without any; mixed with plain rows."""
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(2, VOCABULARY, generator=generator)
    p = filtered(torch.softmax(logits / 0.8, -1), [filters] * 2)
    count, width = 4000, len(drafts) + 1
    rows = [Verification(i * width, drafts, 0.8, i, 0, filters=filters if i % 2 else None) for i in range(2 * count)]
    many = logits[:width].repeat(2 * count, 1)
    chosen = verify(many, many.argmax(-1).tolist(), rows)
    found = Counter(tokens[:1] for tokens in chosen[1::2])
    assert all(p[0, token] > 0 for (token,) in found)
    assert chi_square(found, {(a,): float(p[0, a]) for a in range(VOCABULARY)}) < 20.0  # 4 degrees, 1 in 2000
    plain = Counter(tokens[:1] for tokens in chosen[::2])
    unfiltered = torch.softmax(logits[0] / 0.8, -1)
    assert chi_square(plain, {(a,): float(unfiltered[a]) for a in range(VOCABULARY)}) < 20.0
    if drafts:
        seconds = Counter(tokens[1:2] for tokens in chosen[1::2] if len(tokens) == 2)
        assert chi_square(seconds, {(a,): float(p[1, a]) for a in range(VOCABULARY)}) < 20.0
