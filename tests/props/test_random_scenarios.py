# SPDX-License-Identifier: Apache-2.0
"""In random scenarios of any kind nobody starves, no block leaks or has two owners, and no KV is read uncomputed."""

from __future__ import annotations

from collections import Counter

import pytest

from paceline.core.departures import REASONS

from .scenarios import play

SEED = 1
CHUNK = 100
DEFAULT = 1000
LONG = 20_000


def play_chunk(seed: int, first: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for index in range(first, first + CHUNK):
        seen.update(play(seed, index))
    return seen


@pytest.mark.parametrize("first", range(0, DEFAULT, CHUNK))
def test_random_scenarios(first: int) -> None:
    assert play_chunk(SEED, first)["scenarios"] == CHUNK


@pytest.mark.long
def test_twenty_thousand_further_random_scenarios() -> None:
    seen: Counter[str] = Counter()
    for first in range(DEFAULT, DEFAULT + LONG, CHUNK):
        seen.update(play_chunk(SEED, first))
    assert seen["scenarios"] == LONG
    assert all(seen[f"departure {name}"] for name in REASONS), "the scenarios miss a departure"


def test_a_scenario_depends_on_nothing_but_its_numbers() -> None:
    assert [play(SEED, index) for index in range(20)] == [play(SEED, index) for index in range(20)]
