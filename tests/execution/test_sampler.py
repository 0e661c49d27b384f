# SPDX-License-Identifier: Apache-2.0
"""Random numbers that belong to a request, and drawing by them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.execution.sampler import Purpose, derived_seed, draw, probabilities, uniform


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
