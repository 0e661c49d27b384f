# SPDX-License-Identifier: Apache-2.0
"""The loop of a rank in lock-step, with threads for processes: no hang, equal steps, the tokens of a rank alone."""

from __future__ import annotations

import random
import time

import pytest

from paceline.core.graphs import FULL, NONE
from paceline.core.lockstep import POLL, RUN
from paceline.core.plan import TransferEvent
from paceline.engine.messages import Stop
from tests.engine.fleet import Loads
from tests.line.threads import DEADLINE_S, Line, ScriptedModel, W, said


def check_steps(line: Line) -> None:
    """Every rank executed the same agreements, each step once."""
    first, *others = [[agreement for _, agreement in model.seen] for model in line.models]
    assert all(agreed == first for agreed in others)
    steps = [agreement.step for agreement in first if agreement is not None]
    assert steps == sorted(set(steps))


def check_blocks(line: Line) -> None:
    """Nothing is owned when nobody has work."""
    for scheduler in line.schedulers:
        assert not scheduler.has_work
        assert scheduler.pool.num_free == scheduler.pool.num_usable


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("seed", range(25))
def test_random_schedules(ranks: int, seed: int) -> None:
    """Requests of uneven lengths, aborts (of what runs, waits, or was just sent), and gaps long enough to sleep."""
    rng = random.Random(seed)
    prompts: dict[str, tuple[list[int], int]] = {}
    aborted: set[str] = set()
    with Line(ranks) as line:
        home: dict[str, int] = {}
        for _ in range(rng.randint(5, 25)):
            for _ in range(rng.randint(1, 4)):
                prompt = [rng.randrange(1000) for _ in range(rng.randint(1, 60))]
                rank, count = rng.randrange(ranks), rng.randint(1, 50)
                name = line.add(rank, prompt, count)
                prompts[name], home[name] = (prompt, count), rank
                if rng.random() < 0.15:
                    victim = rng.choice([name, *home])
                    line.abort(home[victim], victim)
                    aborted.add(victim)
            gap = rng.choice((0, 0, 0.001, 0.005, 0.02))
            if gap:
                time.sleep(gap)
            while line.receive(0):
                pass
        line.drain()
        line.stop(rng.randrange(ranks))
        check_steps(line)
        check_blocks(line)
    for name, (prompt, count) in prompts.items():
        expected = said(prompt, count)
        if name in aborted:
            assert line.reasons[name] in ("abort", "length")
            assert line.tokens[name] == expected[: len(line.tokens[name])]
        else:
            assert (line.reasons[name], line.tokens[name]) == ("length", expected)


def test_a_group_says_what_one_rank_alone_says() -> None:
    prompts = [([seed * 37 + i for i in range(1 + seed * 3 % 50)], 5 + seed) for seed in range(12)]
    spoken = []
    for ranks in (0, 1, 2, 3):
        with Line(ranks) as line:
            names = [line.add(i % max(ranks, 1), prompt, count) for i, (prompt, count) in enumerate(prompts)]
            line.drain()
            line.stop()
            spoken.append([line.tokens[name] for name in names])
    assert spoken[0] == spoken[1] == spoken[2] == spoken[3]


def test_L1_an_idle_rank_is_a_dummy_of_W_tokens_and_costs_nobody_the_graph() -> None:
    with Line(2) as line:
        line.add(0, [1, 2, 3], 40)
        line.drain()
        line.stop()
    executed = [agreement for plan, agreement in line.models[0].seen if plan.rows and agreement is not None]
    assert [agreement.mode for agreement in executed] == [NONE, *[FULL] * (len(executed) - 1)], "prefill, then decode"
    assert {agreement.tokens_by_rank for agreement in executed} == {(3, W), (W, W)}
    busy, idle = line.models
    assert busy.steps.by_mode == idle.steps.dummies_by_mode == [1, len(executed) - 1]
    assert idle.steps.by_mode == busy.steps.dummies_by_mode == [0, 0]


def test_L4_a_rank_that_only_waits_for_a_load_runs_dummies() -> None:
    with Line(2, connectors=[None, Loads({"loading": 31}, asynchronous=True)]) as line:
        waiting = line.models[1]
        arrived: list[int] = []

        def arrive() -> None:
            dummies = [agreement for _, agreement in waiting.seen if agreement is not None and agreement.run == RUN]
            if len(dummies) > 10 and line.schedulers[1].holding and not arrived:
                [request] = line.schedulers[1].holding
                arrived.append(len(waiting.seen))
                waiting.events.append(TransferEvent("loaded", request.seq, request.generation))

        waiting._on_launch = arrive
        prompt = list(range(32))
        line.add(1, prompt, 10, "loading")
        line.add(0, [1], 100, "busy")
        line.drain()
        line.stop()
        assert line.tokens == {"loading": said(prompt, 10), "busy": said([1], 100)}
        assert not any(plan.rows for plan, _ in waiting.seen[: arrived[0]])
        runs = [a for _, a in waiting.seen[: arrived[0]] if a is not None and a.run == RUN]
        assert {agreement.tokens_by_rank[1] for agreement in runs} == {W}
        [first] = [agreement for plan, agreement in waiting.seen if plan.first and agreement is not None]
        assert (first.run, first.mode) == (RUN, FULL), "padded when it leaves the queue"
        check_blocks(line)


def test_L4_if_nobody_has_rows_the_group_polls_until_the_load_ends() -> None:
    with Line(2, connectors=[None, Loads({"loading": 31}, asynchronous=True)]) as line:
        model = line.models[1]

        def arrive() -> None:
            if len(model.seen) == 12:
                [request] = line.schedulers[1].holding
                model.events.append(TransferEvent("loaded", request.seq, request.generation))

        model._on_launch = arrive
        prompt = list(range(32))
        line.add(1, prompt, 10, "loading")
        line.drain()
        line.stop()
        assert line.tokens["loading"] == said(prompt, 10)
        assert {agreement.run for _, agreement in model.seen[:12] if agreement is not None} == {POLL}


@pytest.mark.parametrize("failing", [0, 1])
def test_L11_a_row_that_fails_ends_its_request_after_the_step_and_no_other(failing: int) -> None:
    halves = [Loads({"r0": 31}, asynchronous=False), Loads({"r1": 31}, asynchronous=False)]
    prompts = [list(range(32)), list(range(1, 33))]
    with Line(2, connectors=halves) as line:
        line.models[failing].errors = {0: "the peer is gone"}
        for rank, prompt in enumerate(prompts):
            line.add(rank, prompt, 20, f"r{rank}")
        line.drain()
        line.stop()
        assert line.reasons == {f"r{failing}": "error", f"r{1 - failing}": "length"}
        assert line.tokens[f"r{1 - failing}"] == said(prompts[1 - failing], 20)
        check_steps(line)
        check_blocks(line)


def test_L5_requests_to_a_sleeping_group_wake_all_ranks_once() -> None:
    with Line(3) as line:
        for _ in range(5):
            wait_for_sleep(line)
            before = line.votes.history[-1][0].wave
            line.add(0, [before], 4)
            line.add(2, [before, before], 4)
            line.drain()
            wait_for_sleep(line)
            # Both may share a wave, or come too far apart for that.
            assert line.votes.history[-1][0].wave in (before + 1, before + 2)
        line.stop(1)
    assert set(line.reasons.values()) == {"length"}


def test_a_sleeping_group_does_not_vote() -> None:
    with Line(2) as line:
        line.add(1, [5], 3)
        line.drain()
        wait_for_sleep(line)
        before = len(line.votes.history)
        line.abort(0, "nobody")
        line.abort(1, "nobody")
        time.sleep(0.05)
        assert len(line.votes.history) == before, "an abort alone wakes nobody"
        line.stop()


def test_L8_a_drafter_with_any_number_of_drafts_stays_uniform() -> None:
    with Line(2) as line:
        for i in range(8):
            line.add(i % 2, [i], 60)
        line.drain()
        line.stop()
    modes = [agreement.mode for plan, agreement in line.models[0].seen if plan.rows and agreement is not None]
    assert sum(mode == NONE for mode in modes) <= 4, "prefills only"


def test_L9_three_requests_in_a_graph_for_four_leave_a_row_of_padding() -> None:
    with Line(2) as line:
        names = [line.add(0, [i], 30) for i in range(3)]
        line.drain()
        line.stop()
        padded = [
            agreement.size - plan.tokens
            for plan, agreement in line.models[0].seen
            if plan.rows and agreement is not None and agreement.mode == FULL
        ]
    assert W in padded, "three rows beside the size for four"
    assert line.models[0].steps.padding_tokens == sum(padded)
    assert [line.tokens[name] for name in names] == [said([i], 30) for i in range(3)]


def test_L12_an_abort_between_vote_and_forward_takes_effect_at_the_next_begin() -> None:
    with Line(2) as line:
        model = line.models[0]
        sent: list[int] = []

        def abort_once() -> None:
            plan, _ = model.seen[-1]
            if plan.rows and len(model.seen) > 3 and not sent:
                line.abort(0, victim)
                sent.append(len(model.seen))
                time.sleep(0.02)

        model._on_launch = abort_once
        victim = line.add(0, [1], 80)
        other = line.add(1, [2], 80)
        line.drain()
        line.stop()
        assert line.reasons == {victim: "abort", other: "length"}
        assert line.tokens[other] == said([2], 80)
        plan, agreement = model.seen[sent[0] - 1]
        assert agreement is not None
        assert agreement.tokens_by_rank[0] == plan.tokens, "the step ran as voted"
        after = [agreement for _, agreement in model.seen[sent[0] :] if agreement is not None and agreement.run == RUN]
        assert after
        assert {agreement.tokens_by_rank[0] for agreement in after} == {W}, "dummies in its place"


def test_once_a_stop_is_agreed_on_new_requests_are_refused_and_old_ones_finish() -> None:
    with Line(2) as line:
        first = line.add(0, [1], 100)
        while not line.tokens[first]:
            assert line.receive(int(DEADLINE_S * 1000))
        late: list[str] = []

        def add_after_stop() -> None:
            if line.votes.history[-1][1].stop and not late:
                late.append(line.add(0, [2], 5))

        line.models[0]._on_launch = add_after_stop
        line.send(1, Stop())
        line.drain()
        line.stop(1)
        assert (line.reasons[first], line.tokens[first]) == ("length", said([1], 100))
        assert line.reasons[late[0]] == "error"
        assert "shutting down" in line.refusals[late[0]]


def test_a_stop_that_comes_after_the_end_is_no_news() -> None:
    """One rank's stop ends all, perhaps before the next is told."""
    with Line(2) as line:
        line.stop(0)
        line.stop()
    assert not any(thread.is_alive() for thread in line.threads)
    assert not line.failures


def test_a_rank_that_fails_ends_the_others_too() -> None:
    with Line(3) as line:
        line.models[1]._on_launch = fail_later(line.models[1])
        line.add(0, [1], 100)
        for thread in line.threads:
            thread.join(DEADLINE_S)
        assert sorted(type(error).__name__ for error in line.failures) == ["PeerLost", "PeerLost", "ZeroDivisionError"]


def fail_later(model: ScriptedModel) -> object:
    def launch() -> None:
        if len(model.seen) == 5:
            raise ZeroDivisionError

    return launch


def test_a_closed_link_ends_a_sleeping_rank() -> None:
    with Line(2) as line:
        wait_for_sleep(line)
    assert not any(thread.is_alive() for thread in line.threads)
    assert not line.failures


def wait_for_sleep(line: Line) -> None:
    """Wait until the last votes say that nobody has work, and every rank knows them."""

    def asleep() -> bool:
        history = line.votes.history
        known = all(left == len(history) for left in line.votes.left)
        return known and bool(history) and not any(vote.has_work for vote in history[-1])

    ends = time.monotonic() + DEADLINE_S
    while not asleep():
        assert time.monotonic() < ends
        time.sleep(0.001)
