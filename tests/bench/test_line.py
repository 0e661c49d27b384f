# SPDX-License-Identifier: Apache-2.0
"""``paceline bench line`` without the ranks: what it asks for, what it reads, what it makes of it."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.bench.line import (
    AFTER,
    BEFORE,
    Counts,
    LineOptions,
    LineResult,
    Load,
    Measured,
    Profile,
    counts_in,
    parse_rates,
)
from paceline.bench.line_lab import fit_cost, scenario_of, simulate_line
from paceline.core.config import ConfigError
from paceline.sim.cluster import simulate

METRICS = """
# TYPE paceline:steps counter
paceline:steps_total{engine="0",mode="FULL",model_name="m"} 90
paceline:steps_total{engine="0",mode="NONE",model_name="m"} 5
paceline:steps_total{engine="1",mode="FULL",model_name="m"} 44
paceline:steps_total{engine="1",mode="NONE",model_name="m"} 4
# TYPE paceline:dummy_steps counter
paceline:dummy_steps_total{engine="0",mode="FULL",model_name="m"} 15
paceline:dummy_steps_total{engine="1",mode="FULL",model_name="m"} 60
# TYPE paceline:uniformity_miss counter
paceline:uniformity_miss_total{engine="0",model_name="m",reason="qlen_1_resumed"} 3
paceline:uniformity_miss_total{engine="1",model_name="m",reason="qlen_1_resumed"} 4
# TYPE paceline:idle_rank_admissions counter
paceline:idle_rank_admissions_total{engine="0",model_name="m"} 3
paceline:idle_rank_admissions_total{engine="1",model_name="m"} 4
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 100
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 150
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 156
"""


def options(**changes: Any) -> LineOptions:
    return LineOptions(model=Path("model"), draft=Path("draft"), **changes)


def test_counters_are_joined_over_the_ranks_and_taken_between_two_readings() -> None:
    counts = counts_in(METRICS)
    assert counts.group_steps == 110, "a step of the group is one on every rank, dummies included"
    assert dict(counts.steps) == {"FULL": 105, "NONE": 5}
    assert dict(counts.misses) == {"qlen_1_resumed": 7}
    assert counts.idle_rank_admissions == 7
    assert counts.full_step_share == pytest.approx(105 / 110)
    assert counts.acceptance_length == pytest.approx(2.53)
    later = counts_in(METRICS.replace('mode="NONE",model_name="m"} 5', 'mode="NONE",model_name="m"} 7'))
    assert dict(later.since(counts).steps) == {"NONE": 2}
    assert later.since(counts).full_step_share == 0.0


def test_the_server_gets_what_the_experiment_needs() -> None:
    arguments = options(ranks=3, max_num_seqs=6).server_arguments(BEFORE, "FULL_DECODE_ONLY")
    value = dict(pairwise(arguments))
    assert arguments[0] == "model"
    assert {"--enable-expert-parallel", "--no-enable-prefix-caching"} <= set(arguments)
    assert (value["--data-parallel-size"], value["--max-num-batched-tokens"]) == ("3", "24")
    speculation = json.loads(value["--speculative-config"])
    assert (speculation["method"], speculation["model"], speculation["pad_resumed"]) == ("eagle3", "draft", "running")
    assert json.loads(value["--kv-transfer-config"])["kv_connector"] == "DecodeBenchConnector"
    assert json.loads(value["--compilation-config"]) == {"cudagraph_mode": "FULL_DECODE_ONLY"}


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": 1},
        {"request_rates": ()},
        {"request_rates": (1.0, 0.0)},
        {"request_rates": (math.inf,)},
        {"num_prompts": 0},
        {"acceptance": ()},
        {"rounds": 0},
    ],
)
def test_what_is_no_experiment_is_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        options(**changes)
    assert refused.value.field == next(iter(changes))


@pytest.mark.parametrize("text", ["", "1,x", "1,,2"])
def test_rates_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="request_rates"):
        parse_rates(text)
    assert parse_rates("0.5,2") == (0.5, 2.0)


def test_the_gaps_of_all_rounds_are_taken_together() -> None:
    one = Load(np.full(99, 0.020), Counts(Counter(FULL=50), Counter(), 3, 10, 15), 5)
    two = Load(np.array([0.100]), Counts(Counter(NONE=50), Counter(qlen_1_resumed=2), 4, 10, 16), 4, Counter(gone=1))
    both = Measured((one, two)).to_json()
    assert both["p50_itl_ms"] == pytest.approx(20)
    assert both["p99_itl_ms"] == pytest.approx(20.8), "of 100 gaps, between the 99th and the last"
    assert both["p99_itl_ms_by_round"] == pytest.approx([20, 100])
    assert (both["full_step_share"], both["group_steps"], both["misses"]) == (0.5, 100, {"qlen_1_resumed": 2})
    assert (both["idle_rank_admissions"], both["completed"], both["failed"]) == (7, 9, 1)
    assert both["acceptance_length"] == pytest.approx(1 + 31 / 20)


def test_each_round_has_a_load_of_its_own_and_the_laboratory_the_same() -> None:
    o = options(rounds=3, num_prompts=30, request_rates=(1.0,))
    assert [o.workload(1.0, 30, None, turn).seed for turn in range(3)] == [300, 301, 302]
    nothing = {1.0: Measured(())}
    profile = Profile({1: 50, 4: 56}, {1: 80, 4: 86})
    simulated = simulate_line(LineResult(o, nothing, nothing, profile))
    assert simulated is not None
    assert [run.seed for run in simulated.after[1.0].runs] == [300, 301, 302]
    p99s = sorted(run.p99_itl_ms for run in simulated.after[1.0].runs)
    assert simulated.to_json()["rates"][0]["after"]["p99_itl_ms"] == p99s[1]


def test_a_profile_gives_back_the_costs_that_made_it() -> None:
    rows = (1, 2, 4, 8)
    cost = fit_cost(Profile({n: 40 + 2.5 * n for n in rows}, {n: 70 + 2.5 * n for n in rows}))
    assert cost.step_base_ms == pytest.approx(40)
    assert cost.eager_step_ms == pytest.approx(70)
    assert cost.per_group_row_ms == pytest.approx(2.5)
    with pytest.raises(ValueError, match="two loads"):
        fit_cost(Profile({1: 40}, {1: 70}))


def test_the_laboratory_runs_what_the_ranks_run() -> None:
    o = options(num_prompts=80)
    cost = fit_cost(Profile({1: 50, 4: 56}, {1: 80, 4: 86}))
    before, after = (simulate(scenario_of(o, 0.5, pad, cost)) for pad in (BEFORE, AFTER))
    assert (before.completed, after.completed, after.full_step_share) == (80, 80, 1.0)
    assert set(before.misses) == {"qlen_1_resumed"}
    assert before.misses["qlen_1_resumed"] >= before.idle_rank_admissions > 20
    assert before.p99_itl_ms > after.p99_itl_ms
