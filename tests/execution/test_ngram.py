# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.execution.ngram import NgramDrafter


def propose(tokens: list[int], k: int = 3, low: int = 2, high: int = 4, limit: int = 1000) -> tuple[int, ...]:
    return NgramDrafter(low, high, k, limit).propose(np.array(tokens, dtype=np.int64))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], (3, 4, 5)),
        ([1, 2, 7, 9, 1, 2, 8, 9, 1, 2], (8, 9, 1)),  # 9 1 2 is longer than 1 2
        ([1, 2, 7, 5, 1, 2, 8, 6, 1, 2], (7, 5, 1)),  # of equal matches the first
        ([5, 5, 5, 5, 5], (5,)),
        ([1, 2, 3, 4, 5, 6], ()),
        ([1, 2, 1], ()),  # one token is less than the shortest n-gram
        ([1, 2], ()),
        ([4, 1, 2, 1, 2], (1, 2)),
    ],
)
def test_what_followed_the_longest_earlier_match_is_proposed(tokens: list[int], expected: tuple[int, ...]) -> None:
    assert propose(tokens) == expected


def test_no_draft_stands_at_or_past_the_longest_sequence() -> None:
    tokens = [1, 2, 3, 4, 5, 1, 2]
    assert [len(propose(tokens, limit=limit)) for limit in (7, 8, 9, 10, 11)] == [0, 1, 2, 3, 3]


def brute_force(tokens: list[int], k: int, low: int, high: int) -> tuple[int, ...]:
    for n in range(min(high, len(tokens) - 1), low - 1, -1):
        suffix = tokens[-n:]
        for i in range(len(tokens) - n):
            if tokens[i : i + n] == suffix:
                return tuple(tokens[i + n : i + n + k])
    return ()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 5), st.integers(1, 3), st.integers(0, 3))
def test_equals_the_definition(tokens: list[int], k: int, low: int, more: int) -> None:
    assert propose(tokens, k, low, low + more) == brute_force(tokens, k, low, low + more)
