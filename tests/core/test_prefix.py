# SPDX-License-Identifier: Apache-2.0
"""The prefix index: duplicates are all kept, the oldest is hit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.kv.prefix import PrefixIndex


def test_the_oldest_of_duplicates_is_hit_and_the_next_when_it_goes() -> None:
    index = PrefixIndex()
    for block in (7, 3, 5):
        index.register(b"a", block)
    assert index.find(b"a") == 7
    index.drop(7)
    assert index.find(b"a") == 3
    index.drop(5)
    assert index.find(b"a") == 3
    index.drop(3)
    assert index.find(b"a") is None
    assert len(index) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6), st.integers(0, 3)), max_size=40))
def test_it_maps_both_ways_and_back(operations: list[tuple[bool, int, int]]) -> None:
    index = PrefixIndex()
    order: list[tuple[int, bytes]] = []
    for add, block, number in operations:
        known = dict(order)
        if add and block not in known:
            index.register(bytes([number]), block)
            order.append((block, bytes([number])))
        elif not add and block in known:
            index.drop(block)
            order = [entry for entry in order if entry[0] != block]
        assert index.hash_of == dict(order)
        for key in (bytes([n]) for n in range(4)):
            assert index.find(key) == next((b for b, k in order if k == key), None)
