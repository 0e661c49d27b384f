# SPDX-License-Identifier: Apache-2.0
"""DecodeBench, scheduler half: every prompt but its last token is there at once, and only missing blocks are filled."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.connectors.decode_bench.scheduler import DecodeBenchScheduler, Fill
from paceline.core.config import CacheConfig, EngineConfig, GroupConfig, SchedulerConfig
from paceline.core.plan import StepPlan, StepResult
from paceline.core.request import Request, SamplingParams, StoredTokens
from paceline.core.scheduler import Scheduler

FULL = GroupConfig()


def scheduler(
    block_size: int = 16, *, caching: bool = True, num_blocks: int = 200, groups: tuple[GroupConfig, ...] = (FULL,)
) -> Scheduler:
    config = EngineConfig(
        scheduler=SchedulerConfig(max_model_len=300),
        cache=CacheConfig(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=caching, groups=groups),
    )
    return Scheduler(config, DecodeBenchScheduler(block_size))


def request(name: str, ids: Any, max_tokens: int = 50) -> Request:
    return Request(name, StoredTokens(list(ids)), SamplingParams(max_tokens=max_tokens))


def step(s: Scheduler, token: int = 5) -> StepPlan:
    plan = s.plan(0.0)
    s.commit(StepResult(plan.step, [(token,) if row.samples else () for row in plan.rows]), 0.0)
    return plan


@pytest.mark.parametrize("bs", [8, 16, 64])
@pytest.mark.parametrize("length", [2, 15, 16, 17, 33, 64, 65, 200])
def test_all_but_the_last_token_is_filled_at_once(length: int, bs: int) -> None:
    s = scheduler(bs)
    r = request("r", range(length))
    s.add(r)
    plan = step(s)
    assert [(row.start, row.n, row.samples) for row in plan.rows] == [(length - 1, 1, True)]
    table = r.tables[0]
    assert plan.load_meta == [Fill(r.seq, (tuple(table[: -(-(length - 1) // bs)]),), length - 1)]
    assert step(s).load_meta is None, "once"


def test_a_one_token_prompt_has_nothing_to_fill() -> None:
    s = scheduler()
    s.add(request("r", [1]))
    plan = step(s)
    assert plan.load_meta is None
    assert [(row.start, row.n) for row in plan.rows] == [(0, 1)]


@pytest.mark.parametrize(("bs", "local", "external"), [(16, 2, 2), (16, 1, 3), (8, 4, 1), (64, 1, 1)])
def test_T13_blocks_of_the_local_prefix_are_never_filled(bs: int, local: int, external: int) -> None:
    s = scheduler(bs)
    shared = list(range(local * bs))
    s.add(request("first", [*shared, 7]))
    step(s)
    r = request("second", [*shared, *range(1000, 1000 + external * bs), 8])
    s.add(r)
    plan = step(s)
    assert plan.load_meta == [Fill(r.seq, (tuple(r.tables[0][local : local + external]),), external * bs)]


def test_a_prompt_that_is_cached_up_to_its_last_token_is_not_filled() -> None:
    s = scheduler()
    for name in ("first", "second"):
        s.add(request(name, range(33)))
        plan = step(s)
        assert (plan.load_meta is None) == (name == "second")


@pytest.mark.parametrize("caching", [True, False])
def test_a_preempted_request_is_filled_again_with_its_outputs_and_does_not_prefill(caching: bool) -> None:
    s = scheduler(caching=caching)
    r = request("r", range(40))
    s.add(r)
    for _ in range(30):
        step(s)
    s.preempt("r")
    plan = step(s)
    (row,) = plan.rows
    assert (row.start, row.n) == (69, 1)
    local = 64 if caching else 0
    assert plan.load_meta == [Fill(r.seq, (tuple(r.tables[0][local // 16 : 5]),), 69 - local)]


def test_every_cache_group_is_filled_and_no_null_block_is() -> None:
    s = scheduler(groups=(FULL, GroupConfig(kind="sliding", sliding_window=32), GroupConfig(kind="recurrent")))
    r = request("r", range(100))
    s.add(r)
    plan = step(s)
    (fill,) = plan.load_meta
    assert len(fill.blocks) == 3
    assert fill.blocks[0] == tuple(r.tables[0][:7])
    assert all(0 not in blocks for blocks in fill.blocks)


def test_several_requests_of_a_step_are_filled_together_and_an_aborted_one_is_not() -> None:
    s = scheduler()
    for i in range(3):
        s.add(request(f"r{i}", range(100 * i, 100 * i + 20)))
    s.abort("r1")
    plan = step(s)
    assert [fill.seq for fill in plan.load_meta] == [0, 2]
    assert [fill.tokens for fill in plan.load_meta] == [19, 19]
