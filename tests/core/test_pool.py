# SPDX-License-Identifier: Apache-2.0
"""The block pool: every block is free or owned, and what can still be hit is reused last."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline.core.kv.pool import NULL_BLOCK, BlockPool


def key(n: int) -> bytes:
    return n.to_bytes(4, "little")


def test_the_null_block_is_never_given_away() -> None:
    pool = BlockPool(5)
    assert (pool.num_usable, pool.num_free) == (4, 4)
    blocks = pool.take(4)
    assert blocks is not None
    assert sorted(blocks) == [1, 2, 3, 4]
    pool.touch([NULL_BLOCK])
    pool.release(blocks)
    assert pool.num_free == 4
    assert pool.owners() == {}


@pytest.mark.parametrize("count", [5, 100])
def test_more_than_there_is_takes_nothing(count: int) -> None:
    pool = BlockPool(5)
    assert pool.take(count) is None
    assert pool.num_free == 4
    assert pool.take(0) == []


def test_unhashed_blocks_are_reused_first_then_hashed_ones_in_the_order_of_their_release() -> None:
    pool = BlockPool(7)
    blocks = pool.take(6)
    assert blocks is not None
    for n, block in enumerate(blocks[:4]):
        pool.index.register(key(n), block)
    pool.release(blocks[:2])
    pool.release(blocks[2:4])
    pool.release(blocks[4:])
    first = pool.take(2)
    assert first is not None
    assert sorted(first) == sorted(blocks[4:])
    # tail first within a table, so that a chain is evicted from its end
    assert [pool.take(1) for _ in range(4)] == [[blocks[1]], [blocks[0]], [blocks[3]], [blocks[2]]]
    assert len(pool.index) == 0, "a hash goes when its block is reused"


def test_a_hash_survives_release_and_a_hit_takes_the_block_out_of_the_free_list() -> None:
    pool = BlockPool(4)
    blocks = pool.take(2)
    assert blocks is not None
    pool.index.register(key(1), blocks[0])
    pool.release(blocks)
    assert pool.index.find(key(1)) == blocks[0]
    assert pool.is_free_hit(blocks[0])
    assert not pool.is_free_hit(blocks[1])
    pool.touch([blocks[0]])
    assert pool.num_free == 2
    assert not pool.is_free_hit(blocks[0])
    taken = pool.take(2)
    assert taken is not None
    assert blocks[0] not in taken


def test_a_shared_block_is_free_when_its_last_owner_lets_go() -> None:
    pool = BlockPool(4)
    blocks = pool.take(1)
    assert blocks is not None
    pool.index.register(key(1), blocks[0])
    for _ in range(2):
        pool.touch(blocks)
    assert pool.owners() == {blocks[0]: 3}
    assert pool.owners()[blocks[0]] > 1
    for left in (2, 1):
        pool.release(blocks)
        assert pool.owners() == {blocks[0]: left}
    pool.release(blocks)
    assert pool.owners() == {}


@pytest.mark.parametrize("free", [True, False])
def test_a_forgotten_block_is_hit_no_more_and_reused_like_any_other(free: bool) -> None:
    pool = BlockPool(4)
    blocks = pool.take(1)
    assert blocks is not None
    pool.index.register(key(1), blocks[0])
    if free:
        pool.release(blocks)
    pool.forget([*blocks, 3])
    assert pool.index.find(key(1)) is None
    assert not pool.is_free_hit(blocks[0])
    if not free:
        pool.release(blocks)
    assert pool.num_free == 3
    assert pool.take(1) == blocks, "unhashed and last released: the first to be reused"


class PoolMachine(RuleBasedStateMachine):
    """Random owners against a plain dictionary of counts."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.tables: list[list[int]] = []
        self.keys = 0

    @rule(count=st.integers(0, 6))
    def take(self, count: int) -> None:
        free = self.pool.num_free
        blocks = self.pool.take(count)
        assert (blocks is None) == (count > free)
        if blocks is not None:
            assert len(set(blocks)) == count
            assert not set(blocks) & {b for t in self.tables for b in t}
            assert not any(b in self.pool.index.hash_of for b in blocks)
            self.tables.append(blocks)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.tables:
            table = data.draw(st.sampled_from(self.tables))
            shared = table[: data.draw(st.integers(0, len(table)))]
            self.pool.touch(shared)
            self.tables.append(list(shared))

    @rule(data=st.data())
    def hash(self, data: st.DataObject) -> None:
        blocks = sorted({b for t in self.tables for b in t} - set(self.pool.index.hash_of))
        if blocks:
            self.pool.index.register(key(data.draw(st.integers(0, 4))), data.draw(st.sampled_from(blocks)))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.tables:
            self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @rule(number=st.integers(0, 4))
    def hit(self, number: int) -> None:
        block = self.pool.index.find(key(number))
        if block is not None:
            self.pool.touch([block])
            self.tables.append([block])

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        self.pool.forget(data.draw(st.lists(st.integers(1, 11), max_size=3, unique=True)))

    @invariant()
    def everything_is_accounted_for(self) -> None:
        counts: dict[int, int] = {}
        for table in self.tables:
            for block in table:
                counts[block] = counts.get(block, 0) + 1
        assert self.pool.owners() == counts
        assert self.pool.num_free + len(counts) == self.pool.num_usable


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
