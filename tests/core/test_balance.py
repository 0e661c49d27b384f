# SPDX-License-Identifier: Apache-2.0
"""Which rank takes a request (case L6), and which node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.balance import RankBalancer, RankLoad, RoundRobin
from paceline.core.config import ConfigError


@pytest.mark.parametrize(("ranks", "arrivals"), [(2, 10), (4, 8), (3, 9), (16, 160)])
def test_L6_arrivals_are_even_though_every_pick_is_followed_by_an_old_snapshot(ranks: int, arrivals: int) -> None:
    balancer = RankBalancer(ranks)
    stale = [RankLoad() for _ in range(ranks)]
    picks = []
    for _ in range(arrivals):
        picks.append(balancer.pick())
        balancer.snapshot(stale)
    assert [picks.count(r) for r in range(ranks)] == [arrivals // ranks] * ranks


@pytest.mark.parametrize("clients", [1, 2, 4])
def test_L6_without_any_snapshot_the_ranks_take_turns(clients: int) -> None:
    balancer = RankBalancer(4, clients=clients, client_index=clients - 1)
    picks = [balancer.pick() for _ in range(12)]
    assert [picks.count(r) for r in range(4)] == [3] * 4


@given(st.integers(1, 4), st.integers(0, 20), st.integers(0, 20), st.integers(0, 20), st.floats(0, 1, allow_nan=False))
def test_the_score(clients: int, in_flight: int, waiting: int, running: int, usage: float) -> None:
    balancer = RankBalancer(1, clients=clients)
    for _ in range(in_flight):
        balancer.pick()
    balancer.snapshot([RankLoad(waiting, running, usage)])
    expected = max(clients * in_flight, waiting + running) + 6 * waiting * max(0.0, usage - 0.5)
    assert balancer.score(0) == pytest.approx(expected)


def test_a_pick_counts_as_waiting_for_every_client_until_the_next_snapshot() -> None:
    balancer = RankBalancer(2, clients=3)
    loads = [RankLoad(waiting=0, running=5, kv_usage=0.9), RankLoad(waiting=0, running=7, kv_usage=0.9)]
    balancer.snapshot(loads)
    assert balancer.pick() == 0
    assert balancer.score(0) == pytest.approx(8 + 6 * 3 * 0.4)
    balancer.snapshot(loads)
    assert balancer.score(0) == 5


def test_waiting_behind_a_full_cache_weighs_more_than_running() -> None:
    balancer = RankBalancer(2)
    balancer.snapshot([RankLoad(waiting=2, running=2, kv_usage=0.95), RankLoad(waiting=0, running=6, kv_usage=0.6)])
    assert balancer.pick() == 1
    balancer.snapshot([RankLoad(waiting=2, running=2, kv_usage=0.5), RankLoad(waiting=0, running=6, kv_usage=0.6)])
    assert balancer.pick() == 0


def test_the_strict_minimum_wins_and_ties_go_round_from_a_place_that_differs_by_client() -> None:
    first = [RankBalancer(4, clients=2, client_index=i).pick() for i in range(2)]
    assert first == [0, 2]
    balancer = RankBalancer(3)
    balancer.snapshot([RankLoad(running=1), RankLoad(running=0), RankLoad(running=1)])
    assert balancer.pick() == 1


@pytest.mark.parametrize("ranks", [2, 5])
def test_requests_that_end_before_the_next_one_comes_go_round_the_ranks(ranks: int) -> None:
    balancer = RankBalancer(ranks)
    picks = []
    for _ in range(2 * ranks):
        picks.append(balancer.pick())
        balancer.done(picks[-1])
        balancer.snapshot([RankLoad() for _ in range(ranks)])
    assert picks == [*range(ranks)] * 2


def test_a_request_that_left_is_no_longer_counted() -> None:
    balancer = RankBalancer(2)
    picks = [balancer.pick() for _ in range(4)]
    for rank in picks:
        balancer.done(rank)
    balancer.snapshot([RankLoad(), RankLoad()])
    assert [balancer.score(r) for r in range(2)] == [0, 0]


def test_a_requested_rank_bypasses_the_choice_and_is_counted() -> None:
    balancer = RankBalancer(2)
    assert [balancer.pick(1) for _ in range(3)] == [1, 1, 1]
    assert balancer.score(1) == 3
    assert balancer.pick() == 0


@pytest.mark.parametrize("rank", [-1, 2, 100])
def test_a_requested_rank_out_of_range_is_an_error_that_names_the_header(rank: int) -> None:
    balancer = RankBalancer(2)
    with pytest.raises(ConfigError, match=f"X-data-parallel-rank: must be a rank from 0 to 1, got {rank}"):
        balancer.pick(rank)
    assert [balancer.score(r) for r in range(2)] == [0, 0]


def test_nodes_take_turns() -> None:
    nodes = RoundRobin(3)
    assert [nodes.pick() for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
