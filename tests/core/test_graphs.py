# SPDX-License-Identifier: Apache-2.0
"""Decode graphs: which sizes are captured, and which one a step replays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.graphs import FULL, NONE, GraphDispatcher, capture_sizes

from .driving import Drive, engine_config

sizes_given = st.none() | st.lists(st.integers(1, 600), min_size=1, max_size=12).map(tuple)


@given(sizes_given, st.integers(1, 9), st.integers(1, 70))
def test_sizes_are_multiples_of_W_without_duplicates_up_to_a_full_house(
    sizes: tuple[int, ...] | None, width: int, seqs: int
) -> None:
    captured = capture_sizes(sizes, width, seqs)
    assert captured[-1] == width * seqs
    assert list(captured) == sorted(set(captured))
    assert all(size % width == 0 for size in captured)
    for size in sizes or ():
        rounded = -(-size // width) * width
        assert rounded in captured or rounded > width * seqs
    for size in captured[:-1]:
        assert sizes is None or any(-(-s // width) * width == size for s in sizes), "nothing is captured unasked"


@given(sizes_given, st.integers(0, 6), st.integers(1, 20), st.integers(0, 200))
def test_dispatch_finds_the_smallest_capture_that_is_large_enough(
    sizes: tuple[int, ...] | None, K: int, seqs: int, tokens: int
) -> None:
    graphs = GraphDispatcher(engine_config(K=K, seqs=seqs, capture_sizes=sizes))
    fitting = [size for size in graphs.sizes if size >= tokens]
    assert graphs.size_for(tokens) == (min(fitting) if fitting else 0)


@given(st.integers(0, 6), st.integers(1, 20), st.integers(1, 300), st.integers(0, 10), st.booleans())
def test_FULL_iff_graphs_are_on_and_the_step_is_uniform_W_and_fits(
    K: int, seqs: int, tokens: int, width: int, on: bool
) -> None:
    graphs = GraphDispatcher(engine_config(K=K, seqs=seqs, graphs=on))
    expected = on and width == 1 + K and tokens <= (1 + K) * seqs
    assert graphs.mode_for(tokens, width) == (FULL if expected else NONE)


def test_a_capture_list_is_rounded_up_to_the_verifier_width() -> None:
    assert capture_sizes((1, 2, 4, 8, 9), 4, 12) == (4, 8, 12, 48)
    assert capture_sizes(None, 1, 10) == (1, 2, 4, 8, 10)
    assert capture_sizes((64,), 4, 2) == (8,)


@pytest.mark.parametrize(("rows", "padded"), [(1, 4), (2, 8), (3, 16), (4, 16)])
def test_a_step_of_fewer_rows_replays_the_next_larger_graph(rows: int, padded: int) -> None:
    d = Drive(engine_config(seqs=4, capture_sizes=(4, 8)))
    graphs = GraphDispatcher(d.s.config)
    for i in range(rows):
        d.running(f"r{i}", 20)
    plan = d.plan()
    assert plan.tokens == 4 * rows
    assert graphs.mode_for(plan.tokens, plan.width) == FULL
    assert graphs.size_for(plan.tokens) == padded
