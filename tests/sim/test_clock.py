# SPDX-License-Identifier: Apache-2.0
"""Virtual time: what is due first happens first, and what is due together in the order in which it was set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.sim.clock import EventLoop


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.25]), max_size=30))
def test_events_run_by_time_and_then_in_the_order_in_which_they_were_set(times: list[float]) -> None:
    loop, seen = EventLoop(), []
    for i, at in enumerate(times):
        loop.at(at, lambda i=i, at=at: seen.append((at, i, loop.now)))  # type: ignore[misc]
    loop.run()
    assert seen == [(at, i, at) for at, i in sorted((at, i) for i, at in enumerate(times))]


def test_an_event_may_set_others_now_and_later_but_not_in_the_past() -> None:
    loop, seen = EventLoop(), []

    def first() -> None:
        loop.at(loop.now, lambda: seen.append("now"))
        loop.at(loop.now + 1.0, lambda: seen.append("later"))
        seen.append("first")
        with pytest.raises(ValueError, match=r"at 1\.0 s"):
            loop.at(0.5, lambda: None)

    loop.at(1.0, first)
    loop.at(1.0, lambda: seen.append("second"))
    loop.at(1.5, lambda: seen.append("between"))
    loop.run()
    assert seen == ["first", "second", "now", "between", "later"]
    assert loop.now == 2.0


def test_a_loop_that_has_run_out_can_go_on() -> None:
    loop, seen = EventLoop(), []
    loop.run()
    loop.at(3.0, lambda: seen.append(loop.now))
    loop.run()
    loop.at(3.0, lambda: seen.append(loop.now))
    loop.run()
    assert seen == [3.0, 3.0]
