# SPDX-License-Identifier: Apache-2.0
"""Random numbers that belong to a request, and drawing by them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.request import SamplingParams
from paceline.execution.sampler import Filters, Purpose, derived_seed, draw, filtered, probabilities, uniform, uniforms


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**40))
def test_numbers_lie_in_the_unit_interval_and_depend_on_all_arguments(seed: int, position: int) -> None:
    number = uniform(seed, position, Purpose.ACCEPT)
    assert 0.0 <= number < 1.0
    assert number == uniform(seed, position, Purpose.ACCEPT)
    others = [
        uniform(seed + 1, position, Purpose.ACCEPT),
        uniform(seed, position + 1, Purpose.ACCEPT),
        uniform(seed, position, Purpose.SAMPLE),
    ]
    assert len({number, *others}) == 4


@pytest.mark.parametrize("along", ["seed", "position", "both"])
def test_numbers_are_uniform_and_uncorrelated(along: str) -> None:
    count = 40_000
    seeds = range(count) if along != "position" else [7] * count
    positions = range(count) if along != "seed" else [3] * count
    x = np.array([uniform(s, p, Purpose.SAMPLE) for s, p in zip(seeds, positions, strict=True)])
    expected = count / 50
    chi_square = (((np.histogram(x, 50, (0, 1))[0] - expected) ** 2) / expected).sum()
    assert chi_square < 85.4  # 49 degrees of freedom: exceeded once in 1000
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 4 / count**0.5


def test_requests_without_a_seed_get_different_ones() -> None:
    assert len({derived_seed(executor, seq) for executor in range(20) for seq in range(200)}) == 4000


def test_probabilities_follow_each_rows_temperature() -> None:
    logits = torch.randn(3, 20)
    found = probabilities(logits, [1.0, 0.5, 2.0])
    for row, temperature in enumerate((1.0, 0.5, 2.0)):
        torch.testing.assert_close(found[row], torch.softmax(logits[row] / temperature, -1))


def test_a_tiny_temperature_is_greedy_and_stays_finite() -> None:
    logits = torch.tensor([[3.0, 80.0, 79.9]])
    assert probabilities(logits, [1e-30]).tolist() == [[0.0, 1.0, 0.0]]


def test_drawing_inverts_the_distribution() -> None:
    weights = torch.tensor([[0.0, 2.0, 0.0, 1.0, 1.0, 0.0]]).expand(4, -1)
    assert draw(weights, [0.0, 0.49, 0.51, 1 - 2**-53]) == [1, 1, 3, 4]


@given(st.lists(st.sampled_from([0.0, 1e-30, 1e-3, 1.0]), min_size=1, max_size=9).filter(any), st.floats(0, 1 - 2**-53))
def test_weight_zero_is_never_drawn(weights: list[float], number: float) -> None:
    assert weights[draw(torch.tensor([weights]), [number])[0]] > 0


Floats = npt.NDArray[np.float64]


def reference(p: Floats, f: Filters) -> Floats:
    """Sort, cut, normalise; step by step."""
    p = np.where(p >= f.min_p * p.max(), p, 0.0)
    p = p / p.sum()
    if f.top_k:
        p = np.where(p >= np.sort(p)[::-1][min(f.top_k, len(p)) - 1], p, 0.0)
        p = p / p.sum()
    kept, mass = np.zeros(len(p), dtype=bool), 0.0
    for token in np.argsort(-p):
        if mass >= f.top_p:
            break
        kept[token] = True
        mass += p[token]
    p = np.where(kept, p, 0.0)
    return np.asarray(p / p.sum())


FILTERS = st.builds(
    Filters, st.sampled_from([0.0, 0.05, 0.5, 1.0]), st.integers(0, 14), st.sampled_from([1.0, 0.97, 0.6, 0.2, 1e-9])
)


@settings(deadline=None)
@given(st.lists(FILTERS, min_size=1, max_size=5), st.integers(0, 2**31), st.sampled_from([0.3, 2.0, 6.0]))
def test_filters_equal_the_reference_in_any_company(filters: list[Filters], seed: int, spread: float) -> None:
    logits = torch.randn(len(filters), 12, generator=torch.Generator().manual_seed(seed)) * spread
    p = torch.softmax(logits, -1)
    before = p.clone()
    found = filtered(p, filters)
    for i, f in enumerate(filters):
        np.testing.assert_allclose(found[i].numpy(), reference(before[i].double().numpy(), f), atol=2e-6)
        assert torch.equal(filtered(p[i : i + 1], [f])[0], found[i])
    assert torch.equal(p, before)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_nuclei_of_a_large_vocabulary(top_p: float) -> None:
    """Smaller and larger than what is sorted first."""
    p = torch.softmax(torch.randn(2, 3000, generator=torch.Generator().manual_seed(0)).double() * 2.0, -1)
    found = filtered(p, [Filters(top_p=top_p)] * 2)
    for row in range(2):
        np.testing.assert_allclose(found[row].numpy(), reference(p[row].numpy(), Filters(top_p=top_p)), atol=1e-9)


def test_equally_likely_tokens_stay_or_go_together() -> None:
    p = torch.tensor([[0.1, 0.3, 0.3, 0.3]])
    for f in (Filters(top_k=1), Filters(top_k=2), Filters(top_p=0.2), Filters(top_p=0.5), Filters(min_p=1.0)):
        assert filtered(p, [f])[0].tolist() == pytest.approx([0.0, 1 / 3, 1 / 3, 1 / 3])


def test_only_requests_that_cut_something_have_filters() -> None:
    assert Filters.of(SamplingParams()) is None
    assert Filters.of(SamplingParams(top_k=-1, seed=4, presence_penalty=1.0)) is None
    assert Filters.of(SamplingParams(temperature=0.0, top_k=3, top_p=0.5, min_p=0.5)) is None
    assert Filters.of(SamplingParams(top_k=3, top_p=0.5, min_p=0.1)) == Filters(0.1, 3, 0.5)


def test_many_numbers_are_those_drawn_one_by_one() -> None:
    seeds, positions = (
        [0, 5, 2**64 - 1, -3, 2**70 + 9],
        np.array([[0, 1, 2], [7, 8, 9], [0, 99, 10**6], [1, 2, 3], [4, 5, 6]]),
    )
    for purpose in Purpose:
        found = uniforms(seeds, positions, purpose)
        assert found.tolist() == [
            [uniform(seed, int(position), purpose) for position in row]
            for seed, row in zip(seeds, positions, strict=True)
        ]
