# SPDX-License-Identifier: Apache-2.0
"""Ranks in step: cases L1, L3, L4, L5, L8, L11 and L12 as one process sees them, in virtual time."""

from __future__ import annotations

import random

import pytest

from paceline.core.graphs import FULL, NONE
from paceline.core.lockstep import POLL, RUN, SLEEP, OutOfStep, agree
from paceline.core.plan import TransferEvent
from paceline.core.request import State

from .fleet import DRAFT, MODEL, Fleet, K, Loads, W, config


@pytest.mark.parametrize("busy", [0, 1])
@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("rows", [1, 3])
def test_L1_the_dummies_of_idle_ranks_are_W_wide_and_the_step_is_FULL(rows: int, ranks: int, busy: int) -> None:
    f = Fleet(ranks)
    for i in range(rows):
        f.add(busy, f"r{i}", 10)
    assert f.step().mode == NONE, "the prefill"
    agreed = f.step()
    assert (agreed.run, agreed.mode) == (RUN, FULL)
    assert agreed.size >= rows * W
    assert agreed.tokens_by_rank == tuple(rows * W if r == busy else W for r in range(ranks))
    for r, executor in enumerate(f.executors):
        plan, told = executor.launched[-1]
        assert told == agreed, "every rank runs what was agreed"
        assert (plan.tokens, len(plan.rows)) == ((rows * W, rows) if r == busy else (0, 0))
    assert f.run()
    assert set(f.ended().values()) == {"length"}


@pytest.mark.parametrize("method", ["eagle3", "mtp", "draft_model", "ngram"])
def test_L3_every_rank_makes_the_same_drafter_passes_though_one_is_near_max_model_len(method: str) -> None:
    f = Fleet(2, config(method=method, mml=26))
    f.add(0, "near", 19)
    f.add(1, "far", 5)
    while not f.ended().get("near"):
        agreed = f.step()
        assert agreed.draft_passes == (0 if method == "ngram" else K)
        assert len({id(executor.launched[-1][1]) for executor in f.executors}) == 1
    near_mml = [a for a in f.agreements if a.tokens_by_rank[0] == 1]
    assert near_mml
    assert all(a.mode == NONE for a in near_mml)


def test_L4_a_rank_that_only_waits_for_a_load_runs_dummies_and_hears_of_its_end() -> None:
    f = Fleet(2, connectors=[None, Loads({"loading": 31}, asynchronous=True)])
    f.add(0, "busy", 10, max_tokens=150)
    request = f.add(1, "loading", 32)
    f.step()
    for _ in range(5):
        agreed = f.step()
        assert (agreed.run, agreed.mode, agreed.tokens_by_rank) == (RUN, FULL, (W, W))
        assert request.state is State.LOADING
    f.loaded(1, request)
    f.step()
    agreed = f.step()
    assert (agreed.mode, agreed.tokens_by_rank) == (FULL, (W, W)), "padded when it leaves the queue"
    assert request.output.tolist() == [MODEL]


def test_L4_if_nobody_has_rows_the_group_polls() -> None:
    f = Fleet(2, connectors=[None, Loads({"loading": 31}, asynchronous=True)])
    request = f.add(1, "loading", 32, max_tokens=4)
    for _ in range(3):
        agreed = f.step()
        assert (agreed.run, agreed.tokens_by_rank) == (POLL, (0, 0))
    f.loaded(1, request)
    assert f.step().run == POLL
    f.run()
    assert f.ended() == {"loading": "length"}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_L5_requests_to_a_sleeping_group_wake_all_ranks_once(ranks: int) -> None:
    f = Fleet(ranks)
    assert f.step().run == SLEEP
    for wave in range(1, 4):
        f.add(0, f"a{wave}", 10)
        f.add(ranks - 1, f"b{wave}", 10)  # at once with the other
        assert (f.group.wave.number, f.group.wave.awake) == (wave, True)
        steps = f.run()
        assert steps
        assert not f.group.wave.awake
        assert f.step().run == SLEEP, "asked while asleep it sleeps on"
    assert len(f.ended()) == 6
    assert [a.step for a in f.agreements] == list(range(len(f.agreements)))


def test_L8_a_drafter_that_returns_any_number_of_drafts_never_costs_the_group_its_graph() -> None:
    f = Fleet(3)
    rng = random.Random(1)
    f.executors[1].drafts = lambda: rng.randint(0, K)
    for rank in range(3):
        for i in range(3):
            f.add(rank, f"r{rank}{i}", 10, max_tokens=150)
    f.step()
    for _ in range(30):
        agreed = f.step()
        assert (agreed.mode, agreed.tokens_by_rank) == (FULL, (3 * W,) * 3)
    widths = {sum(d == DRAFT for d in row.drafts) for plan, _ in f.executors[1].launched for row in plan.rows}
    assert widths == set(range(K + 1))


@pytest.mark.parametrize("failing", [0, 1])
def test_L11_a_synchronous_load_that_fails_ends_its_request_after_the_step_and_no_other(failing: int) -> None:
    f = Fleet(2, connectors=[Loads({"r0": 31}, asynchronous=False), Loads({"r1": 31}, asynchronous=False)])
    requests = [f.add(rank, f"r{rank}", 32) for rank in range(2)]
    agreed = f.begin()
    assert (agreed.mode, agreed.tokens_by_rank) == (FULL, (W, W)), "nobody knows yet"
    f.executors[failing].errors = {0: "the peer is gone"}
    f.loaded(failing, requests[failing], error="the peer is gone")
    f.finish()
    assert f.ended() == {f"r{failing}": "error"}
    assert requests[1 - failing].output.tolist() == [MODEL]
    f.run()
    assert f.ended()[f"r{1 - failing}"] == "length"


@pytest.mark.parametrize("when", ["running", "waiting"])
def test_L12_an_abort_between_vote_and_forward_takes_effect_at_the_next_begin(when: str) -> None:
    f = Fleet(2)
    f.add(0, "gone", 10)
    f.add(1, "other", 10, max_tokens=60)
    if when == "running":
        f.step()
    agreed = f.begin()
    plan = f.ranks[0].plan
    rows = list(plan.rows)
    f.ranks[0].abort("gone")
    assert f.ranks[0].plan is plan
    assert list(plan.rows) == rows
    assert [executor.launched[-1][1] for executor in f.executors] == [agreed, agreed]
    f.finish()
    assert f.ended() == {"gone": "abort"}
    agreed = f.step()
    assert agreed.tokens_by_rank == (W, W), "a dummy in its place"
    assert not f.ranks[0].plan.rows


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_last_step_of_a_wave_only_tells_executors_what_has_ended(ranks: int) -> None:
    f = Fleet(ranks)
    request = f.add(0, "r", 10, max_tokens=4)
    steps = f.run()
    assert [a.run for a in f.agreements] == [RUN] * len(steps) + [POLL, SLEEP]
    plan, _ = f.executors[0].launched[-1]
    assert (list(plan.rows), list(plan.retired)) == ([], [request.seq])
    assert f.ended() == {"r": "length"}


def test_a_group_of_one_is_a_rank_on_its_own() -> None:
    f = Fleet(1)
    f.add(0, "r", 10)
    modes = [a.mode for a in f.run()]
    assert modes[0] == NONE
    assert set(modes[1:]) == {FULL}
    assert f.ended() == {"r": "length"}


def test_an_abort_of_everything_ends_in_a_poll_that_delivers_it() -> None:
    f = Fleet(2)
    f.add(0, "r", 10)
    f.step()
    f.ranks[0].abort("r")
    f.run()
    assert f.ended() == {"r": "abort"}
    f.add(1, "never", 10)
    f.ranks[1].abort("never")
    f.run()
    assert f.ended()["never"] == "abort"


def test_ranks_of_different_steps_do_not_agree() -> None:
    f = Fleet(2)
    f.add(0, "r", 10)
    votes = []
    for i, rank in enumerate(f.ranks):
        rank.begin(0.0)
        votes.append(rank.vote(step=i, wave=0))
    with pytest.raises(OutOfStep):
        agree(votes, f.group.graphs)


def test_a_completion_that_arrives_when_its_rank_is_idle_lifts_the_quarantine() -> None:
    """Quarantined blocks are no work, so their rank may have nothing to plan when the transport confirms."""
    loads = Loads({"late": 31}, asynchronous=True)
    f = Fleet(2, config(transfer_deadline_s=0.05), connectors=[None, loads])
    f.add(0, "busy", 10, max_tokens=150)
    request = f.add(1, "late", 32)
    while "late" not in f.ended():
        f.step()
    scheduler = f.ranks[1].scheduler
    f.step()
    assert not scheduler.has_work
    assert scheduler.kv_usage > 0
    f.executors[1].events.append(TransferEvent("loaded", request.seq, 0))
    f.step()
    f.step()
    assert scheduler.kv_usage == 0


def test_a_stop_is_agreed_on_by_all_and_carried_to_the_next_sleep() -> None:
    f = Fleet(2)
    f.add(0, "r", 10, max_tokens=4)
    assert not f.group.begin(0.0).stop
    f.finish()
    agreed = f.group.begin(0.0, stop=True)
    assert (agreed.run, agreed.stop) == (RUN, True)
    f.finish()
    while agreed.run != SLEEP:
        agreed = f.group.begin(0.0, stop=True)
        if agreed.run != SLEEP:
            f.finish()
    assert agreed.stop
    assert f.ended() == {"r": "length"}
