# SPDX-License-Identifier: Apache-2.0
"""The agreement: whatever the votes, all ranks run the same mode, size and number of collectives."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.graphs import FULL, NONE, GraphDispatcher
from paceline.core.lockstep import POLL, RUN, SLEEP, Agreement, OutOfStep, Vote, agree

from .driving import engine_config

SEQS = 6


def dispatcher(K: int, sizes: tuple[int, ...] | None = None) -> GraphDispatcher:
    return GraphDispatcher(engine_config(K=K, seqs=SEQS, capture_sizes=sizes))


@st.composite
def groups(draw: st.DrawFn) -> tuple[GraphDispatcher, list[Vote]]:
    """A dispatcher and the votes of 1 to 8 ranks: idle, uniform W, or mixed, each with its local reasons."""
    K = draw(st.integers(0, 4))
    graphs = dispatcher(K, draw(st.sampled_from([None, (1, 2, 4), (W := 1 + K,), (2 * W, 4 * W)])))
    votes = []
    for _ in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(["idle", "uniform", "uniform", "narrow", "mixed"]))
        n = draw(st.integers(1, SEQS))
        passes = draw(st.sampled_from([0, K]))
        stop = draw(st.booleans())
        if kind == "idle":
            votes.append(Vote(5, 2, 0, 0, 0, NONE, draw(st.booleans()), 0, stop))
            continue
        width = {"uniform": 1 + K, "narrow": 1, "mixed": 0}[kind]
        tokens = draw(st.integers(n, 60)) if kind == "mixed" else width * n
        mode = graphs.mode_for(tokens, width)
        if draw(st.integers(0, 9)) == 0:
            mode = NONE  # some other local reason for running eagerly
        votes.append(Vote(5, 2, tokens, n, width, mode, True, passes, stop))
    return graphs, votes


@given(groups())
def test_FULL_if_and_only_if_every_rank_with_rows_is_uniform_and_wishes_it_and_a_capture_fits(
    group: tuple[GraphDispatcher, list[Vote]],
) -> None:
    graphs, votes = group
    agreed = agree(votes, graphs)
    rows = [v for v in votes if v.tokens]
    full = bool(rows) and all(v.mode == FULL and v.width == graphs.width for v in rows)
    largest = max((v.tokens for v in rows), default=0)
    fitting = [size for size in graphs.sizes if size >= largest]
    assert (agreed.mode == FULL) == (full and bool(fitting))
    assert agreed.size == (min(fitting) if agreed.mode == FULL else 0)


@given(groups())
def test_RUN_if_somebody_has_rows_else_POLL_if_somebody_has_work_else_SLEEP(
    group: tuple[GraphDispatcher, list[Vote]],
) -> None:
    graphs, votes = group
    agreed = agree(votes, graphs)
    if any(v.tokens for v in votes):
        assert agreed.run == RUN
    else:
        assert agreed.run == (POLL if any(v.has_work for v in votes) else SLEEP)
        assert (agreed.mode, agreed.size, agreed.draft_passes) == (NONE, 0, 0)


@given(groups())
def test_every_rank_takes_part_in_as_many_collectives(group: tuple[GraphDispatcher, list[Vote]]) -> None:
    graphs, votes = group
    agreed = agree(votes, graphs)
    assert len(agreed.tokens_by_rank) == len(votes)
    if agreed.run == RUN:
        assert agreed.draft_passes == max(v.draft_passes for v in votes if v.tokens)
        assert agreed.tokens_by_rank == tuple(v.tokens or graphs.width for v in votes), "the idle run W dummy tokens"
        if agreed.mode == FULL:
            assert max(agreed.tokens_by_rank) <= agreed.size


@given(groups(), st.data())
def test_an_idle_rank_never_changes_mode_size_or_passes(
    group: tuple[GraphDispatcher, list[Vote]], data: st.DataObject
) -> None:
    graphs, votes = group
    before = agree(votes, graphs)
    at = data.draw(st.integers(0, len(votes)))
    idle = Vote(5, 2, 0, 0, 0, NONE, data.draw(st.booleans()))
    after = agree([*votes[:at], idle, *votes[at:]], graphs)
    assert (after.mode, after.size, after.draft_passes) == (before.mode, before.size, before.draft_passes)
    assert after.run == before.run or (before.run, after.run) == (SLEEP, POLL)


@given(groups(), st.randoms(use_true_random=False))
def test_all_ranks_agree_and_the_order_of_ranks_decides_nothing(
    group: tuple[GraphDispatcher, list[Vote]], random: Any
) -> None:
    graphs, votes = group
    wire = msgspec.msgpack.encode(votes)
    agreements = [agree(msgspec.msgpack.decode(wire, type=list[Vote]), graphs) for _ in votes]
    assert len(set(map(msgspec.json.encode, agreements))) == 1, "every rank computes it from what it received"
    order = list(range(len(votes)))
    random.shuffle(order)
    shuffled = agree([votes[i] for i in order], graphs)
    here: Agreement = agreements[0]
    assert msgspec.structs.replace(shuffled, tokens_by_rank=()) == msgspec.structs.replace(here, tokens_by_rank=())
    assert shuffled.tokens_by_rank == tuple(here.tokens_by_rank[i] for i in order)


@given(groups(), st.integers(0, 7), st.sampled_from([(1, 0), (-1, 0), (0, 1), (0, -1), (3, 3)]))
def test_ranks_out_of_step_or_of_another_wave_end_the_process(
    group: tuple[GraphDispatcher, list[Vote]], which: int, shift: tuple[int, int]
) -> None:
    graphs, votes = group
    votes = [*votes, votes[0]]
    i = which % len(votes)
    votes[i] = msgspec.structs.replace(votes[i], step=5 + shift[0], wave=2 + shift[1])
    with pytest.raises(OutOfStep, match="step 5 of wave 2"):
        agree(votes, graphs)


@given(groups())
def test_one_vote_to_stop_reaches_everybody(group: tuple[GraphDispatcher, list[Vote]]) -> None:
    graphs, votes = group
    assert agree(votes, graphs).stop == any(v.stop for v in votes)


@pytest.mark.parametrize(
    ("widths", "mode"), [((4, 4), FULL), ((4, 1), NONE), ((1, 4), NONE), ((0, 4), NONE), ((4, 0), NONE)]
)
def test_widths_that_differ_run_eagerly_each_rank_at_its_own_size(widths: tuple[int, int], mode: int) -> None:
    graphs = dispatcher(3)
    votes = [Vote(0, 0, 8, 2, w, FULL if w == 4 else NONE, True, 3) for w in widths]
    agreed = agree(votes, graphs)
    assert (agreed.mode, agreed.size) == (mode, 8 if mode == FULL else 0)
    assert agreed.tokens_by_rank == (8, 8)


def test_two_ranks_that_wish_FULL_at_widths_that_differ_run_eagerly() -> None:
    graphs = dispatcher(3)
    for one, other in ((4, 3), (3, 4)):
        votes = [Vote(0, 0, 2 * w, 2, w, FULL, True) for w in (one, other)]
        assert agree(votes, graphs).mode == NONE


def test_L1_the_dummy_of_an_idle_rank_is_W_wide_and_the_step_is_FULL() -> None:
    for K in (0, 1, 3):
        graphs = dispatcher(K)
        W = 1 + K
        busy, idle = Vote(0, 0, 2 * W, 2, W, FULL, True, K), Vote(0, 0, 0, 0, 0, NONE, False)
        for votes in ([busy, idle], [idle, busy], [idle, busy, idle]):
            agreed = agree(votes, graphs)
            assert (agreed.run, agreed.mode) == (RUN, FULL)
            assert agreed.tokens_by_rank == tuple(v.tokens or W for v in votes)
