# SPDX-License-Identifier: Apache-2.0
"""Cases S8, S10, S12, S15, S18, S19 and S21: blocks taken, given back, hit again; and where an output is cut."""

from __future__ import annotations

import pytest

from paceline.core.graphs import NONE
from paceline.core.request import State

from .driving import DRAFT, MODEL, Drive, Offers, engine_config, sync_connector
from .toy_model import ToyDrive, continuation

CONNECTORS = ["decode_bench", "mock"]


@pytest.mark.parametrize("draft_slots", [0, 1])
@pytest.mark.parametrize("drafts", [0, 1])
@pytest.mark.parametrize("K", [2, 3])
def test_S8_a_padded_row_preempted_in_its_own_step_gives_back_its_budget(K: int, drafts: int, draft_slots: int) -> None:
    """Low, high and mid hold 3, 2 and 1 blocks, nothing is free; high takes one of low's, mid the budget of low."""
    W = 1 + K
    d = Drive(engine_config(K=K, policy="priority", num_blocks=7, mml=88, caching=False, draft_slots=draft_slots))
    d.add("low", 34, priority=5)
    d.step(drafts=drafts)
    d.add("high", 33 - W, priority=0)
    d.add("mid", 5, priority=1)
    d.step(drafts=drafts)
    assert [r.id for r in d.s.running] == ["low", "high", "mid"]
    d.budget(2 * (W + draft_slots))
    high, low = d.requests["high"], d.requests["low"]
    high.drafts = (DRAFT,) * K
    assert (d.s.pool.num_free, high.computed + W) == (0, 33)
    plan = d.plan()
    assert d.widths() == {"high": W, "mid": W}
    assert plan.tokens == 2 * W
    assert (low.state, low.computed, low.drafts, low.tables) == (State.PREEMPTED, 0, (), [])
    assert low.seq not in {u.seq for u in plan.blocks}
    d.commit()
    d.budget(256)
    d.run()
    assert d.ended == {"low": "length", "high": "length", "mid": "length"}
    assert d.owned() == 0


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_S8_a_padded_request_whose_blocks_are_not_there_keeps_its_place_and_takes_nothing(
    policy: str, connector: str
) -> None:
    mock = sync_connector(connector, {"r1": 31, "r2": 31})
    d = Drive(engine_config(num_blocks=5, mml=60, policy=policy, caching=False), mock)
    d.add("r1", 31, max_tokens=8)
    d.step()
    d.step()  # r1 needs a third block from here on
    d.add("r2", 31, max_tokens=8)  # its 31 tokens would fit the free block and a half, its padded row would not
    while "r1" not in d.ended:
        plan = d.plan()
        assert (d.widths(), plan.tokens) == ({"r1": 4}, 4)
        assert (d.requests["r2"].drafts, d.requests["r2"].tables) == ((), [])
        d.commit()
    assert d.step()["r2"].drafts == (-1, -1, -1)
    d.run()
    assert d.owned() == 0


@pytest.mark.parametrize(("bs", "blocks"), [(16, 2), (16, 1), (8, 5), (4, 2)])
@pytest.mark.parametrize("K", [0, 3])
def test_S10_of_a_prompt_sent_twice_the_last_block_is_computed_again(K: int, bs: int, blocks: int) -> None:
    d = ToyDrive(engine_config(K=K, block_size=bs))
    prompt = range(blocks * bs)
    d.running("first", prompt)
    d.add("second", prompt)
    row = d.step()["second"]
    assert (row.start, row.n) == ((blocks - 1) * bs, bs), "one token at least must be left to sample from"
    assert d.s.stats.prefix_hits == (blocks - 1) * bs
    d.add("longer", [*prompt, 1, 2, 3])
    row = d.step()["longer"]
    assert (row.start, row.n) == (blocks * bs, 3)


@pytest.mark.parametrize("K", [1, 3, 6])
@pytest.mark.parametrize("max_tokens", [1, 2, 4, 5])
def test_S12_accepted_tokens_beyond_max_tokens_are_cut(max_tokens: int, K: int) -> None:
    d = Drive(engine_config(K=K))
    request = d.add("r", 20, max_tokens=max_tokens)
    while "r" not in d.ended:
        d.step(accept=K)
    assert d.ended["r"] == "length"
    assert d.tokens["r"] == request.output.tolist() == [MODEL, *([DRAFT] * K + [MODEL]) * 4][:max_tokens]
    assert request.num_tokens == 20 + max_tokens
    assert d.s.stats.generated_tokens == max_tokens, "what was cut was never generated, for anyone who counts"


def test_S12_each_output_carries_exactly_what_was_kept() -> None:
    d = Drive(engine_config(K=3))
    d.running("r", 20)
    d.requests["r"].max_total = 23
    d.plan()
    (output,) = d.commit(accept=3)
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ((DRAFT, DRAFT), "length", None)


@pytest.mark.parametrize("mode", ["off", "running", "resumed"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(("K", "at"), [(0, 20), (3, 1), (3, 17), (3, 40), (5, 33)])
def test_S15_a_preempted_request_says_the_same_as_one_that_was_left_alone(
    K: int, at: int, graphs: bool, caching: bool, mode: str
) -> None:
    d = ToyDrive(engine_config(K=K, graphs=graphs, caching=caching, pad=mode))
    d.add("r", range(37), max_tokens=60)
    d.add("other", range(20, 60), max_tokens=60)
    d.run(lambda: len(d.tokens["r"]) >= at)
    computed = d.requests["r"].computed
    d.s.preempt("r")
    d.check()
    row = d.step()["r"]
    assert row.start == (computed // 16 * 16 if caching else 0), "it hits its own full blocks"
    d.run()
    assert d.tokens["r"] == continuation(range(37), 60)
    d.assert_right()
    assert d.owned() == 0


@pytest.mark.parametrize("K", [0, 3])
@pytest.mark.parametrize("chunk", [16, 32, 48])
def test_S18_blocks_hashed_for_a_row_that_was_taken_back_are_computed_again(chunk: int, K: int) -> None:
    """Low's third chunk is planned and hashed, takes the last free blocks, and high, behind it, takes them."""
    usable = 3 * chunk // 16 + 1
    d = ToyDrive(
        engine_config(K=K, policy="priority", num_blocks=usable + 1, mml=3 * chunk + 12, threshold=chunk),
        drafter=lambda seq, length: (K, 0),
    )
    d.budget(chunk)
    low = d.add("low", 3 * chunk + 5, priority=5)
    d.step()
    d.budget(256)
    high = d.add("high", 16, priority=0, max_tokens=9)
    assert list(d.step()) == ["low", "high"]
    assert list(d.step()) == ["high"]
    assert d.s.departures["unhash"] == 1
    assert (low.state, low.num_preemptions) == (State.PREEMPTED, 1)
    d.run(lambda: high.state is State.FINISHED)
    assert d.step()["low"].start == 2 * chunk, "the first two chunks are hit, the third is not"
    d.run()
    assert d.ended == {"low": "length", "high": "length"}
    d.assert_right()


@pytest.mark.parametrize("order", [("a", "b", "c"), ("c", "b", "a")])
@pytest.mark.parametrize(("K", "bs"), [(0, 16), (3, 16), (3, 8)])
def test_S19_equal_priorities_and_arrivals_do_not_preempt_each_other_for_ever(
    K: int, bs: int, order: tuple[str, ...]
) -> None:
    blocks = 64 // bs
    d = ToyDrive(engine_config(K=K, block_size=bs, policy="priority", num_blocks=blocks + 1, mml=58, caching=False))
    for name in order:
        d.add(name, range(20), arrival=1.0, max_tokens=30)
    d.run(limit=150)
    assert set(d.ended.values()) == {"length"}
    assert d.requests[order[0]].num_preemptions == 0, "one of them, always the same, goes ahead"
    assert d.s.stats.preemptions <= 2 * len(order)
    d.assert_right()


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("K", [0, 3])
@pytest.mark.parametrize("prompt", [1, 2, 17])
def test_S21_a_prompt_that_is_loaded_whole_is_loaded_once_and_then_runs(prompt: int, K: int, graphs: bool) -> None:
    connector = Offers({"r": prompt}, asynchronous=True)
    d = ToyDrive(engine_config(K=K, graphs=graphs), connector)
    request = d.add("r", prompt, max_tokens=9)
    d.plan()
    assert (request.state, d.rows()) == (State.LOADING, {})
    d.commit()
    d.plan()
    d.commit(transfers=[d.arrives("r", prompt)])
    row = d.step()["r"]
    assert (row.start, row.n - len(row.drafts)) == (prompt - 1, 1), "the last token is computed here"
    d.run()
    assert d.tokens["r"] == continuation(request.source.tokens(0, prompt), 9)
    assert connector.loads == [("r", prompt)]
    assert connector.asked == ["r"], "whoever holds blocks is not asked again"


def test_S21_a_one_token_prompt_beside_a_running_row_is_padded_after_its_load() -> None:
    d = ToyDrive(engine_config(), Offers({"r": 1}, asynchronous=True))
    d.running("other", 20)
    d.add("r", 1)
    d.step()
    d.plan()
    d.commit(transfers=[d.arrives("r", 1)])
    plan = d.plan()
    assert d.widths() == {"other": 4, "r": 4}
    assert plan.width == 4
    assert plan.width != NONE
