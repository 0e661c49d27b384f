# SPDX-License-Identifier: Apache-2.0
"""Cases S4, S6, S7, S11, S13 and S14: token budgets, the long-prefill threshold and what graphs can hold."""

from __future__ import annotations

import pytest

from paceline.core.config import ConfigError
from paceline.core.graphs import FULL, NONE, GraphDispatcher

from .driving import Drive, engine_config, sync_connector

CONNECTORS = ["decode_bench", "mock"]


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize(("K", "threshold"), [(3, 1), (3, 2), (3, 3), (3, 4), (1, 1), (6, 5)])
@pytest.mark.parametrize("graphs", [True, False])
def test_S4_the_long_prefill_threshold_leaves_verifier_rows_whole(
    graphs: bool, K: int, threshold: int, connector: str
) -> None:
    mock = sync_connector(connector, {"r1": 33, "r2": 33})
    d = Drive(engine_config(K=K, threshold=threshold, graphs=graphs), mock)
    d.running("r1", 33)
    d.add("r2", 33)
    for _ in range(4):  # leaving the queue first, then two running verifiers
        plan = d.plan()
        assert d.widths() == {"r1": 1 + K, "r2": 1 + K}
        assert plan.width == 1 + K
        d.commit(accept=K)


@pytest.mark.parametrize("threshold", [1, 4, 7])
def test_S4_the_threshold_clips_prefills_only_while_another_request_exists(threshold: int) -> None:
    d = Drive(engine_config(threshold=threshold))
    d.add("a", 50)
    assert d.step()["a"].n == 50
    d.add("b", 50)
    d.add("c", 50)
    for k in range(3):
        assert {name: row.n for name, row in d.step().items()} == {"a": 4, "b": threshold, "c": threshold}
        assert d.requests["b"].computed == threshold * (k + 1)
    d.s.abort("a")
    d.s.abort("c")
    assert d.step()["b"].n == 50 - 3 * threshold


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize(("K", "budget"), [(3, 8), (3, 10), (3, 11), (1, 5), (5, 15)])
def test_S6_two_of_three_transferred_requests_run_and_the_third_follows_when_one_ends(
    budget: int, K: int, connector: str
) -> None:
    names = ["r1", "r2", "r3", "small"]
    d = Drive(engine_config(K=K, budget=budget), sync_connector(connector, dict.fromkeys(names[:3], 33)))
    for name in names[:3]:
        d.add(name, 33, max_tokens=3 if name == "r1" else 200)
    for _ in range(3):
        plan = d.plan()
        assert d.widths() == {"r1": 1 + K, "r2": 1 + K}
        assert plan.width == 1 + K
        d.commit()
        if "small" not in d.requests:
            d.add("small", 1)  # a prefill of one token that would fit the rest of the budget, behind the third
    assert d.ended == {"r1": "length"}
    rows = d.step()
    assert list(rows)[:2] == ["r2", "r3"]
    assert {rows[n].n for n in ("r2", "r3")} == {1 + K}


@pytest.mark.parametrize("K", [1, 3, 6])
@pytest.mark.parametrize("draft_slots", [0, 1])
def test_S6_a_budget_below_one_verifier_row_is_refused_at_start(K: int, draft_slots: int) -> None:
    least = 1 + K + draft_slots
    with pytest.raises(ConfigError, match="must be at least") as refused:
        engine_config(K=K, draft_slots=draft_slots, budget=least - 1)
    assert refused.value.field == "scheduler.max_num_batched_tokens"
    assert f"at least {least}:" in str(refused.value)
    d = Drive(engine_config(K=K, draft_slots=draft_slots, budget=least))
    d.add("r", 3, max_tokens=20)
    d.run()
    assert d.ended == {"r": "length"}


@pytest.mark.parametrize("count", [3, 4, 5])
@pytest.mark.parametrize(("K", "budget", "draft_slots"), [(3, 10, 0), (3, 11, 0), (1, 5, 0), (3, 12, 1), (4, 5, 0)])
def test_S7_a_verifier_row_is_whole_or_absent_and_the_absent_go_first_next_time(
    budget: int, K: int, draft_slots: int, count: int
) -> None:
    W = 1 + K
    names = [f"r{i}" for i in range(count)]
    d = Drive(
        engine_config(K=K, budget=budget, draft_slots=draft_slots), sync_connector("mock", dict.fromkeys(names, 17))
    )
    fits = budget // (W + draft_slots)
    d.budget(1000)  # let all of them in first
    for name in names:
        d.add(name, 17, max_tokens=400)
    d.step()
    d.budget(budget)
    assert d.s.num_running == count
    served: list[str] = []
    for _ in range(3 * count):
        plan = d.plan()
        assert list(d.widths().values()) == [W] * min(fits, count), f"rows {d.widths()}"
        assert plan.width == W
        served += d.widths()
        d.commit()
        assert [r.id for r in d.s.running] == names, "the order of the list, and so the choice of a victim, stays"
    assert served == [names[i % count] for i in range(len(served))], "round the list"
    assert max(map(served.count, names)) - min(map(served.count, names)) <= 1


def test_S7_a_prefill_row_left_out_is_served_first_too() -> None:
    d = Drive(engine_config(budget=8, seqs=4))
    d.budget(100)
    d.running("r1", 5)
    d.running("r2", 5)
    d.add("long", 120)
    d.step()  # 92 of its tokens
    d.budget(8)
    served = [d.step() for _ in range(6)]
    assert [list(rows) for rows in served][:2] == [["r1", "r2"], ["long"]], "the prefill waits, then leads"
    assert sum("r1" in rows for rows in served) >= 2
    assert sum("long" in rows for rows in served) >= 2


def test_S7_nobody_leaves_the_queue_while_a_running_row_is_unserved() -> None:
    d = Drive(engine_config(budget=6, seqs=4))
    d.budget(100)
    d.running("r1", 5)
    d.running("r2", 5)
    d.budget(6)
    d.add("small", 2)
    for _ in range(4):
        assert len(d.step()) == 1
        assert d.s.num_waiting == 1


@pytest.mark.parametrize(("K", "prompt", "budget"), [(3, 80, 50), (1, 40, 32), (5, 200, 64)])
def test_S11_the_second_chunk_of_a_prompt_has_the_rest_of_its_tokens_and_no_drafts(
    budget: int, prompt: int, K: int
) -> None:
    d = Drive(engine_config(K=K, budget=budget))
    d.add("r", prompt)
    starts = list(range(0, prompt, budget))
    for start in starts:
        plan = d.plan()
        row = d.rows()["r"]
        last = start == starts[-1]
        assert (row.start, row.n, row.samples) == (start, min(budget, prompt - start), last)
        assert row.drafts == ()
        assert list(plan.misses) == ["prefill"]
        d.commit()
    assert d.step()["r"].n == 1 + K


@pytest.mark.parametrize("graphs", [True, False])
def test_S11_a_last_chunk_of_one_token_is_a_decode_row_padded_only_with_graphs(graphs: bool) -> None:
    d = Drive(engine_config(budget=50, graphs=graphs))
    d.add("r", 51)
    d.step()
    plan = d.plan()
    row = d.rows()["r"]
    assert (row.start, row.samples) == (50, True)
    assert (row.n, plan.width) == ((4, 4) if graphs else (1, 1))
    d.commit(accept=3)
    assert len(d.tokens["r"]) == 1


@pytest.mark.parametrize("sizes", [None, (1, 2, 4, 8), (100,), (42,), (41,)])
@pytest.mark.parametrize(("K", "seqs"), [(6, 6), (3, 12), (0, 5), (1, 1), (4, 129)])
def test_S13_the_largest_decode_step_is_always_captured(K: int, seqs: int, sizes: tuple[int, ...] | None) -> None:
    W = 1 + K
    config = engine_config(K=K, seqs=seqs, capture_sizes=sizes, budget=max(256, W * seqs))
    graphs = GraphDispatcher(config)
    assert W * seqs in graphs.sizes
    assert all(size % W == 0 and size <= W * seqs for size in graphs.sizes)
    assert all(graphs.mode_for(W * n, W) == FULL for n in range(1, seqs + 1))


@pytest.mark.parametrize(("bs", "mml"), [(16, 100), (16, 96), (4, 37)])
def test_S14_no_block_table_is_longer_than_max_model_len_needs(bs: int, mml: int) -> None:
    d = Drive(engine_config(block_size=bs, mml=mml, method="eagle3"))
    d.add("r", mml - 20, max_tokens=1000)
    longest = 0
    while "r" not in d.ended:
        d.plan()
        longest = max(longest, *(len(t) for t in d.requests["r"].tables))
        d.commit(accept=2)
    assert longest == -(-mml // bs), "a graph captured for max_model_len reads no further"


def test_S14_a_step_larger_than_any_capture_runs_eagerly() -> None:
    graphs = GraphDispatcher(engine_config(K=3, seqs=4))
    assert graphs.mode_for(16, 4) == FULL
    assert graphs.size_for(17) == 0
    assert graphs.mode_for(20, 4) == NONE
