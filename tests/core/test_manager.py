# SPDX-License-Identifier: Apache-2.0
"""Block tables of one and of several cache groups, driven through the scheduler and read by the toy model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.config import CacheConfig, GroupConfig
from paceline.core.kv.manager import KVManager
from paceline.core.kv.pool import NULL_BLOCK
from paceline.core.request import Request, SamplingParams, StoredTokens
from paceline.core.running import align_chunk

from .driving import Drive, engine_config
from .toy_model import ToyDrive, continuation

FULL = GroupConfig()
RECURRENT = GroupConfig(kind="recurrent")


def sliding(window: int) -> GroupConfig:
    return GroupConfig(kind="sliding", sliding_window=window)


def manager(*groups: GroupConfig, num_blocks: int = 60, block_size: int = 16) -> KVManager:
    return KVManager(CacheConfig(num_blocks=num_blocks, block_size=block_size, groups=groups or (FULL,)), 500)


def request(length: int, first: int = 0) -> Request:
    return Request("r", StoredTokens(range(first, first + length)), SamplingParams())


def hold(kv: KVManager, r: Request, tokens: int) -> None:
    """Admit, allocate and plan ``tokens`` tokens."""
    kv.admit(r, kv.lookup(r))
    assert kv.grow(r, tokens, None)
    r.computed = tokens
    kv.hash_planned(r, tokens)
    kv.end_pass()


@given(st.integers(1, 200), st.integers(1, 200), st.sampled_from([1, 4, 16]), st.integers(2, 40))
def test_grow_takes_what_is_needed_or_nothing(first: int, then: int, bs: int, num_blocks: int) -> None:
    kv = manager(num_blocks=num_blocks, block_size=bs)
    r = request(300)
    kv.admit(r, kv.lookup(r))
    for slots in (first, then):
        free, table, need = kv.pool.num_free, list(r.tables[0]), kv.needed(r, slots)
        updates: list = []
        assert kv.grow(r, slots, updates) == (need <= free)
        if need <= free:
            assert kv.pool.num_free == free - need
            assert r.tables[0][: len(table)] == table
            assert len(r.tables[0]) * bs >= slots
            assert [b for u in updates for b in u.blocks] == r.tables[0][len(table) :]
        else:
            assert (kv.pool.num_free, r.tables[0], updates) == (free, table, [])


def test_no_table_grows_beyond_max_model_len() -> None:
    kv = manager()
    r = request(10)
    kv.admit(r, kv.lookup(r))
    assert kv.grow(r, 100_000, None)
    assert len(r.tables[0]) == -(-500 // 16)


@pytest.mark.parametrize(("length", "hit"), [(16, 0), (17, 16), (32, 16), (33, 32), (100, 96), (1, 0)])
def test_a_hit_leaves_one_token_to_compute(length: int, hit: int) -> None:
    kv = manager()
    hold(kv, a := request(100), 100)
    found = kv.lookup(b := request(length))
    assert found.tokens == hit
    assert found.tables == (a.tables[0][: hit // 16],)
    free = kv.pool.num_free
    assert kv.needed(b, length, found) == -(-length // 16) - hit // 16, "blocks in use cost nothing"
    kv.release(a)
    assert kv.needed(b, length, found) == -(-length // 16), "free ones leave the free list"
    assert kv.pool.num_free == free + 7


@pytest.mark.parametrize("budget", [16, 256])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, FULL)])
def test_a_prompt_is_admitted_when_all_of_it_fits_not_when_its_first_chunk_does(
    groups: tuple[GroupConfig, ...], budget: int
) -> None:
    d = Drive(engine_config(K=0, num_blocks=1 + 6 * len(groups), mml=95, budget=budget, groups=groups))
    d.add("first", 40, max_tokens=2)  # three of the six blocks of a group
    d.add("second", 60, max_tokens=2)  # four
    while "first" not in d.ended:
        assert "second" not in d.step()
    assert "second" in d.step()


def test_a_chain_is_hit_up_to_its_first_gap() -> None:
    kv = manager()
    hold(kv, a := request(100), 100)
    kv.pool.forget([a.tables[0][2]])
    assert kv.lookup(request(100)).tokens == 32


def test_nothing_is_hit_or_hashed_with_caching_off() -> None:
    kv = KVManager(CacheConfig(num_blocks=60, enable_prefix_caching=False), 500)
    hold(kv, request(100), 100)
    assert kv.lookup(request(100)).tokens == 0
    assert len(kv.pool.index) == 0


@pytest.mark.parametrize("window", [1, 8, 16, 17, 32, 33, 48])
@pytest.mark.parametrize("K", [0, 3])
def test_a_sliding_window_keeps_the_blocks_of_the_window_only(K: int, window: int) -> None:
    d = ToyDrive(engine_config(K=K, groups=(FULL, sliding(window)), caching=False))
    r = d.add("r", 100, max_tokens=80)
    d.step()
    most = 0
    while "r" not in d.ended:
        d.plan()
        full, windowed = (sum(b != NULL_BLOCK for b in t) for t in r.tables)
        assert full == len(r.tables[0]), "a full group keeps everything"
        if r.num_tokens > 120:
            most = max(most, windowed)
        d.commit()
    # the window of the first token planned, what is planned, and what a block boundary adds at either end
    assert most <= (window + K + 1) // 16 + 2
    d.assert_right()
    assert d.owned() == 0


@pytest.mark.parametrize(("window", "live"), [(8, 1), (16, 1), (17, 1), (18, 2), (32, 2), (33, 2), (34, 3)])
def test_a_hit_in_a_sliding_group_needs_the_window_only(window: int, live: int) -> None:
    """The token after 96 cached ones attends to the window's other tokens, the last window - 1 of them."""
    kv = manager(FULL, sliding(window))
    a = request(97)
    hold(kv, a, 96)
    full, windowed = a.tables
    kv.pool.forget(windowed[: 6 - live])
    found = kv.lookup(request(97))
    assert found.tokens == 96
    assert found.tables == (full[:6], [NULL_BLOCK] * (6 - live) + windowed[6 - live : 6])
    kv.pool.forget([windowed[6 - live]])
    assert kv.lookup(request(97)).tokens < 96


def test_every_group_must_agree_on_a_hit() -> None:
    kv = manager(FULL, sliding(20))
    a = request(97)
    hold(kv, a, 96)
    kv.pool.forget([a.tables[0][4]])
    found = kv.lookup(request(97))
    assert found.tokens == 64
    assert [len(t) for t in found.tables] == [4, 4]
    kv.pool.forget(a.tables[1])
    assert kv.lookup(request(97)).tokens == 0


@pytest.mark.parametrize("window", [16, 24, 32, 40])
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
@pytest.mark.parametrize("prompt", [65, 64, 90])
def test_dropping_the_last_hit_block_for_a_drafter_leaves_every_group_a_whole_window(
    prompt: int, method: str, window: int
) -> None:
    d = ToyDrive(engine_config(method=method, groups=(FULL, sliding(window))))
    d.add("first", range(prompt), max_tokens=3)
    d.run()
    d.add("again", range(prompt), max_tokens=3)
    assert d.step()["again"].start <= (prompt - 1) // 16 * 16 - 16
    d.run()
    d.assert_right()


@pytest.mark.parametrize("method", ["eagle3", "mtp", "ngram", "draft_model"])
def test_only_drafters_on_hidden_states_drop_the_last_block_of_a_hit(method: str) -> None:
    d = Drive(engine_config(method=method))
    d.running("first", range(65))
    d.add("again", range(65))
    assert d.step()["again"].start == (48 if method in ("eagle3", "mtp") else 64)


@given(st.integers(0, 120), st.integers(1, 120), st.integers(1, 200), st.sampled_from([1, 4, 16]))
def test_chunks_end_on_block_boundaries_up_to_the_last_that_can_be_hit(
    start: int, n: int, num_tokens: int, bs: int
) -> None:
    num_tokens = max(num_tokens, start + 1)
    n = min(n, num_tokens - start)
    aligned = align_chunk(start, n, num_tokens, bs)
    boundary = (num_tokens - 1) // bs * bs
    assert aligned <= n
    if start >= boundary:
        assert aligned == n
    else:
        assert (start + aligned) % bs == 0
        assert start + aligned <= boundary
        assert n < bs or aligned > 0 or start % bs, "a block's worth of budget always moves on"


@pytest.mark.parametrize("groups", [(RECURRENT,), (FULL, RECURRENT), (RECURRENT, sliding(20))])
@pytest.mark.parametrize("budget", [16, 40, 256])
@pytest.mark.parametrize("prompt", [15, 16, 17, 80, 90])
def test_prefill_chunks_of_a_recurrent_layout_end_on_block_boundaries(
    prompt: int, budget: int, groups: tuple[GroupConfig, ...]
) -> None:
    d = ToyDrive(engine_config(K=0, groups=groups, budget=budget))
    d.add("r", prompt, max_tokens=40)
    while "r" not in d.ended:
        row = d.step()["r"]
        end = row.start + row.n
        assert row.samples or end % 16 == 0
        if row.samples and row.n > 1:
            assert row.start >= (prompt - 1) // 16 * 16, "the state at the last boundary is kept"
    assert d.tokens["r"] == continuation(range(1000, 1000 + prompt), 40)
    assert d.owned() == 0


@pytest.mark.parametrize("graphs", [True, False])
def test_verifier_rows_of_a_recurrent_layout_are_not_aligned(graphs: bool) -> None:
    d = ToyDrive(engine_config(K=3, groups=(FULL, RECURRENT), graphs=graphs, caching=False))
    d.add("r", range(30), max_tokens=60)
    while not d.tokens["r"]:
        d.step()
    while "r" not in d.ended:
        assert d.step()["r"].n == 4
    d.assert_right()


@pytest.mark.parametrize("budget", [32, 48, 256])
@pytest.mark.parametrize("common", [20, 33, 64, 70, 80, 89])
def test_a_recurrent_group_is_hit_where_a_state_was_kept_and_nowhere_else(common: int, budget: int) -> None:
    d = ToyDrive(engine_config(K=0, groups=(FULL, RECURRENT), budget=budget))
    d.add("first", range(90), max_tokens=1)
    ends = set()
    while "first" not in d.ended:
        row = d.step()["first"]
        ends.add(row.start + row.n)
    d.add("other", [*range(common), *range(500, 520)], max_tokens=20)
    start = d.step()["other"].start
    kept = [end for end in ends if end % 16 == 0 and end <= common]
    assert start == max(kept, default=0)
    d.run()
    d.assert_right()


def test_a_state_that_is_planned_in_this_pass_is_not_hit_before_the_next() -> None:
    for groups, start in (((FULL, RECURRENT), 0), ((FULL,), 64)):
        d = ToyDrive(engine_config(K=0, groups=groups))
        d.add("first", range(65), max_tokens=30)
        d.add("twin", range(65), max_tokens=30)
        assert d.step()["twin"].start == start
        d.add("later", range(65), max_tokens=30)
        assert d.step()["later"].start == 64
        d.run()
        d.assert_right()


@pytest.mark.parametrize("K", [1, 3])
def test_a_verifier_row_across_a_block_boundary_leaves_no_state_there_to_hit(K: int) -> None:
    """Of a row the state after its last accepted token is kept, which a boundary inside the row is not."""
    d = ToyDrive(engine_config(K=K, groups=(FULL, RECURRENT)), drafter=lambda seq, length: (K, K))
    d.add("first", range(45), max_tokens=60)
    d.run()
    d.add("next", [*range(45), *d.tokens["first"][:40], 1, 2, 3], max_tokens=10)
    d.run()
    d.assert_right()


LAYOUTS = [(FULL,), (FULL, sliding(20)), (FULL, sliding(40), sliding(8)), (FULL, RECURRENT), (RECURRENT,)]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_in_any_layout_random_loads_with_preemptions_say_what_the_model_says(data: st.DataObject) -> None:
    groups = data.draw(st.sampled_from(LAYOUTS))
    recurrent = RECURRENT in groups
    K = data.draw(st.sampled_from([0, 1, 3])) if not recurrent else 0
    per_group = data.draw(st.integers(8, 20))
    d = ToyDrive(
        engine_config(
            K=K,
            block_size=8,
            mml=8 * 8 - 1 - K,
            num_blocks=1 + per_group * len(groups),
            groups=groups,
            seqs=4,
            budget=data.draw(st.sampled_from([8, 20, 64])),
            graphs=data.draw(st.booleans()),
            caching=data.draw(st.booleans()),
            policy=data.draw(st.sampled_from(["fcfs", "priority"])),
        ),
        drafter=lambda seq, length: ((seq + length) % (K + 1), length % (K + 1)),
    )
    for i in range(data.draw(st.integers(1, 6))):
        shared = data.draw(st.integers(0, 30))
        own = data.draw(st.integers(1, 20))
        d.add(
            f"r{i}", [*range(shared), *range(100 * i + 100, 100 * i + 100 + own)],
            max_tokens=data.draw(st.integers(1, 30)), priority=data.draw(st.integers(0, 2)),
        )  # fmt: skip
        for _ in range(data.draw(st.integers(0, 4))):
            d.step()
            if d.s.running and data.draw(st.integers(0, 5)) == 0:
                d.s.preempt(data.draw(st.sampled_from(d.s.running)).id)
                d.check()
    d.run(limit=1500)
    assert set(d.ended.values()) == {"length"}
    d.assert_right()
    assert d.owned() == 0
