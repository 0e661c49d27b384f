# SPDX-License-Identifier: Apache-2.0
"""Cases S1-S3, S5, S9, S16, S20 and S22: who is padded to the verifier's width W = 1 + K, and who is not."""

from __future__ import annotations

import pytest

from paceline.core.graphs import FULL, GraphDispatcher
from paceline.core.plan import PLACEHOLDER, InvalidResult, Row
from paceline.core.request import FinishReason, State
from paceline.core.scheduler import Scheduler

from .driving import DRAFT, MODEL, Drive, engine_config, sync_connector

CONNECTORS = ["decode_bench", "mock"]
SIZES = [(1, 16, 32), (2, 8, 24), (3, 16, 32), (3, 16, 33), (5, 4, 7), (7, 64, 128)]
"""(K, block size, tokens that the connector resolves)."""


def placeholders(K: int) -> tuple[int, ...]:
    return (PLACEHOLDER,) * K


def is_full(s: Scheduler, tokens: int, width: int) -> bool:
    return GraphDispatcher(s.config).mode_for(tokens, width) == FULL


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize(("K", "bs", "resolved"), SIZES)
@pytest.mark.parametrize("pad", ["running", "resumed"])
def test_S1_beside_a_running_verifier_a_resolved_request_is_padded_and_the_step_is_uniform(
    pad: str, K: int, bs: int, resolved: int, connector: str, graphs: bool
) -> None:
    mock = sync_connector(connector, {"r1": resolved + 1, "r2": resolved + 1}, bs)
    d = Drive(engine_config(K=K, block_size=bs, pad=pad, graphs=graphs), mock)
    d.running("r1", resolved + 1)
    d.add("r2", resolved + 1)
    plan = d.plan()
    rows = d.rows()
    assert list(rows) == ["r1", "r2"]
    assert rows["r1"].drafts == (DRAFT,) * K
    assert rows["r2"] == Row(d.requests["r2"].seq, resolved, 1 + K, placeholders(K), True)
    assert (plan.width, plan.tokens, list(plan.misses)) == (1 + K, 2 * (1 + K), [])
    assert is_full(d.s, plan.tokens, plan.width) == graphs
    d.commit(accept=K)
    assert d.tokens["r2"] == [MODEL], "a placeholder is never accepted"
    assert set(d.step(accept=K)["r2"].drafts) == {DRAFT}, "from its second step on it carries real drafts"


@pytest.mark.parametrize("source", [*CONNECTORS, "prefix cache"])
def test_S1_switched_off_the_resolved_request_costs_the_step_its_uniformity(source: str) -> None:
    prompt = range(33)
    connector = None if source == "prefix cache" else sync_connector(source, {"r1": 33, "r2": 33})
    d = Drive(engine_config(pad="off"), connector)
    d.running("r1", prompt)
    d.add("r2", prompt)
    plan = d.plan()
    assert d.widths() == {"r1": 4, "r2": 1}
    assert (plan.width, list(plan.misses)) == (0, ["qlen_1_resumed"])


@pytest.mark.parametrize("pad", ["running", "resumed"])
@pytest.mark.parametrize(("K", "bs", "blocks"), [(3, 16, 2), (1, 8, 1), (4, 16, 5)])
def test_S1_a_prefix_cache_hit_is_padded_like_a_transfer(K: int, bs: int, blocks: int, pad: str) -> None:
    d = Drive(engine_config(K=K, block_size=bs, pad=pad))
    prompt = range(blocks * bs + 1)
    d.running("r1", prompt)
    d.add("r2", prompt)
    plan = d.plan()
    assert d.rows()["r2"].drafts == placeholders(K)
    assert d.rows()["r2"].start == blocks * bs
    assert plan.width == 1 + K


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize(("K", "bs", "resolved"), SIZES)
@pytest.mark.parametrize("pad", ["off", "running", "resumed"])
def test_S2_on_an_idle_rank_only_the_resumed_mode_pads(
    pad: str, K: int, bs: int, resolved: int, connector: str
) -> None:
    d = Drive(engine_config(K=K, block_size=bs, pad=pad), sync_connector(connector, {"r2": resolved + 1}, bs))
    d.add("r2", resolved + 1)
    plan = d.plan()
    row = d.rows()["r2"]
    assert row.start == resolved
    if pad == "resumed":
        assert (row.drafts, plan.width, list(plan.misses)) == (placeholders(K), 1 + K, [])
    else:
        assert (row.drafts, plan.width, list(plan.misses)) == ((), 1, ["qlen_1_resumed"])


@pytest.mark.parametrize("pad", ["running", "resumed"])
def test_S2_a_one_token_prompt_resolves_nothing_and_is_padded_beside_running_rows_only(pad: str) -> None:
    d = Drive(engine_config(pad=pad))
    d.add("first", [1])
    plan = d.plan()
    assert (d.widths(), list(plan.misses)) == ({"first": 1}, ["qlen_1_new"])
    d.commit()
    d.add("second", [2])
    d.plan()
    assert d.widths() == {"first": 4, "second": 4}


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(("K", "resolved"), [(3, 32), (1, 16), (6, 47)])
def test_S3_near_max_model_len_a_resolved_request_gets_one_token_and_goes_on(
    K: int, resolved: int, beside: bool, connector: str
) -> None:
    W = 1 + K
    for mml, width in ((resolved + W, 1), (resolved + W + 1, W)):
        d = Drive(engine_config(K=K, mml=mml), sync_connector(connector, {"r2": resolved + 1, "r1": 2}))
        if beside:
            d.running("r1", 2)
        d.add("r2", resolved + 1, max_tokens=1000)
        plan = d.plan()
        assert d.widths()["r2"] == width
        assert ("near_mml" in plan.misses) == (width == 1)
        d.commit()
        d.s.abort("r1")
        d.run()
        assert d.ended["r2"] == FinishReason.LENGTH.value
        assert len(d.tokens["r2"]) == mml - resolved - 1, "it ends at max_model_len, never before"


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("pad", ["running", "resumed"])
@pytest.mark.parametrize("full_hit_first", [False, True])
@pytest.mark.parametrize("connector", ["mock", "prefix cache"])
@pytest.mark.parametrize(("K", "prompt", "hit"), [(3, 100, 33), (1, 5, 17), (3, 4, 33), (5, 40, 65)])
def test_S5_nobody_is_padded_beside_a_prefill_admitted_in_the_same_pass(
    K: int, prompt: int, hit: int, connector: str, full_hit_first: bool, pad: str, graphs: bool
) -> None:
    mock = sync_connector("mock", {"hit": hit})
    shared = range(hit)
    d = Drive(engine_config(K=K, pad=pad, graphs=graphs), mock if connector == "mock" else None)
    d.running("r1", 2 if connector == "mock" else shared)  # without a connector the hit comes from the prefix cache
    for name in ("hit", "prefill") if full_hit_first else ("prefill", "hit"):
        d.add(name, prompt if name == "prefill" else shared)
    plan = d.plan()
    assert d.widths() == {"r1": 1 + K, "prefill": prompt, "hit": hit - d.rows()["hit"].start}
    assert all(PLACEHOLDER not in row.drafts for row in plan.rows)
    assert plan.width == 0, "a prefill chunk that happens to be W long is no decode row"
    assert "prefill" in plan.misses
    d.commit()
    plan = d.plan()
    assert set(d.widths().values()) == {1 + K}
    assert plan.width == 1 + K, "the step after it is uniform again"


@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("graphs", [True, False])
def test_S5_a_prefill_chunk_that_happens_to_be_W_long_is_no_verifier_row(graphs: bool, K: int) -> None:
    d = Drive(engine_config(K=K, graphs=graphs))
    d.running("r1", 20)
    d.add("prefill", 1 + K)
    plan = d.plan()
    assert d.widths() == {"r1": 1 + K, "prefill": 1 + K}
    assert (plan.width, list(plan.misses)) == (0, ["prefill"])


@pytest.mark.parametrize("connector", ["mock", "prefix cache"])
@pytest.mark.parametrize("K", [1, 3])
def test_S5_padding_survives_a_prefill_that_finds_no_blocks(connector: str, K: int) -> None:
    mock = sync_connector("mock", {"hit": 17, "r1": 65}) if connector == "mock" else None
    prompt = range(65)
    d = Drive(engine_config(K=K, num_blocks=10, mml=120), mock)
    d.running("r1", prompt)
    d.add("hit", 17 if mock else prompt[:17])
    d.add("long", 100)
    plan = d.plan()
    assert d.widths() == {"r1": 1 + K, "hit": 1 + K}
    assert plan.width == 1 + K


@pytest.mark.parametrize("K", [1, 3, 6])
def test_S9_an_accepted_placeholder_is_refused_whatever_token_stands_in_for_it(K: int) -> None:
    d = Drive(engine_config(K=K), sync_connector("mock", {"r": 33}))
    request = d.add("r", 33)
    d.plan()
    good = d.result()
    for accepted in ((PLACEHOLDER, MODEL), (0, MODEL), (0,) * (K + 1)):
        with pytest.raises(InvalidResult, match="row 0"):
            d.s.commit(type(good)(good.step, [accepted], good.next_drafts), d.now)
    assert (request.num_tokens, request.computed, request.output.tolist()) == (33, 33 + K, [])
    d.commit(accept=K)
    assert d.tokens["r"] == [MODEL]
    assert request.computed == request.num_tokens - 1 == 33, "one short of its tokens, ready for real drafts"


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_S16_placeholders_are_counted_in_no_metric(count: int, K: int, connector: str) -> None:
    d = Drive(engine_config(K=K), sync_connector(connector, {f"r{i}": 33 for i in range(count)}))
    for i in range(count):
        d.add(f"r{i}", 33)
    d.step(accept=K)
    acceptance = d.s.stats.acceptance
    assert (acceptance.num_drafts, acceptance.num_draft_tokens, acceptance.num_accepted_tokens) == (0, 0, 0)
    assert acceptance.acceptance_length == 1.0
    d.step(accept=1)
    assert (acceptance.num_drafts, acceptance.num_draft_tokens) == (count, count * K)
    assert acceptance.num_accepted_tokens_per_pos == [count] + [0] * (K - 1)
    assert acceptance.acceptance_length == 2.0


def test_S16_a_row_with_drafts_and_placeholders_counts_its_drafts_alone() -> None:
    d = Drive(engine_config(K=3))
    d.running("r", 20, drafts=2)
    row = d.step(accept=2)["r"]
    assert row.drafts == (DRAFT, DRAFT, PLACEHOLDER)
    acceptance = d.s.stats.acceptance
    assert (acceptance.num_drafts, acceptance.num_draft_tokens) == (1, 2)
    assert acceptance.accepted_lengths == [0, 0, 1, 0]


@pytest.mark.parametrize("draft_count", [0, 1, 2])
@pytest.mark.parametrize("prompt", [40, 60])
def test_S20_a_waiting_prompt_that_does_not_fit_costs_nobody_the_graph(prompt: int, draft_count: int) -> None:
    d = Drive(engine_config(num_blocks=6, mml=70))
    d.running("r1", 40, drafts=draft_count)
    d.add("big", prompt)
    for _ in range(5):
        plan = d.plan()
        assert d.widths() == {"r1": 4}
        assert d.rows()["r1"].drafts == (DRAFT,) * draft_count + placeholders(3 - draft_count)
        assert is_full(d.s, plan.tokens, plan.width)
        d.commit(drafts=draft_count)
        assert d.requests["big"].state is State.WAITING
    d.s.abort("r1")
    assert list(d.step()) == ["big"]


@pytest.mark.parametrize(("one", "other"), [(28, 30), (30, 28), (31, 29), (30, 30)])
@pytest.mark.parametrize("K", [3, 5])
def test_S22_nobody_is_preempted_for_placeholders(one: int, other: int, K: int) -> None:
    d = Drive(engine_config(K=K, num_blocks=5, mml=64 - 1 - K, caching=False))
    for name, tokens in (("r1", one), ("r2", other)):
        request = d.add(name, tokens - 1)
        d.run(lambda request=request: request.num_tokens > request.num_prompt, drafts=0)  # type: ignore[misc]
    while d.requests["r1"].num_tokens <= 32 and d.requests["r2"].num_tokens <= 32:
        plan = d.plan()
        need = {n: d.requests[n].num_tokens + K > 32 for n in ("r1", "r2")}  # whose placeholders want a third block
        assert d.widths() == {n: 1 if need[n] else 1 + K for n in need}
        assert ("no_blocks" in plan.misses) == any(need.values())
        d.commit(drafts=0)
        assert d.s.stats.preemptions == 0


def test_S22_without_graphs_a_short_row_is_as_wide_as_its_drafts() -> None:
    d = Drive(engine_config(graphs=False))
    d.running("r1", 20, drafts=2)
    plan = d.plan()
    assert d.rows()["r1"].drafts == (DRAFT, DRAFT)
    assert (plan.width, list(plan.misses)) == (3, ["short_drafts"])
