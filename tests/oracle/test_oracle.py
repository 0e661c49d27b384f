# SPDX-License-Identifier: Apache-2.0
"""Step by step, the scheduler decides what vLLM 0.32 decides, until one of the named departures changes a decision."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from paceline.core.departures import REASONS

from .generate import Scenario, generate
from .record import Step, header, load, pack, unpack
from .replay import compare

LEAST_CLEAN = 500
LEAST_OF_A_KIND = 20
KINDS = (
    "fcfs",
    "priority",
    "no connector",
    "DecodeBenchConnector",
    "mock sync",
    "mock async",
    "mock later",
    "mock once",
    "preemption fcfs",
    "preemption priority",
    "abort",
    "short drafts",
    "lookahead",
    "draft slots",
    "shared prefix hit",
    "padding",
    "chunked prefill",
    "long prefill threshold",
    "max_model_len reached",
)


@dataclass
class Comparison:
    """Every stored scenario, compared."""

    differences: list[str] = field(default_factory=list)
    clean: Counter[str] = field(default_factory=Counter)
    departures: Counter[str] = field(default_factory=Counter)
    scenarios: int = 0
    clean_scenarios: int = 0
    steps: int = 0


def kinds(scenario: Scenario, steps: list[Step], local_hits: bool) -> set[str]:
    """What a scenario exercised, judged by what happened in it."""
    requests, engine = scenario["requests"], scenario["engine"]
    loads = [r["load"] for r in requests if "load" in r]
    rows = [row for step in steps for row in step["rows"].values()]
    ended = len(steps) < scenario["steps"] and not scenario["aborts"]
    connector = scenario["connector"] or "no connector"
    happened = {
        scenario["policy"]: True,
        connector: connector != "mock",
        "mock sync": any(load["tokens"] > 1 and not load.get("async") for load in loads),
        "mock async": any(step["holding"] for step in steps),
        "mock later": any(load.get("later") for load in loads),
        "mock once": any(load.get("once") for load in loads),
        f"preemption {scenario['policy']}": any(step["preempted"] for step in steps),
        "abort": any(at < len(steps) for at, _ in scenario["aborts"]),
        "short drafts": any(0 < drafts < scenario["K"] for _, drafts, _ in rows),
        "lookahead": scenario["lookahead"] > 0 and any(drafts for _, drafts, _ in rows),
        "draft slots": scenario["draft_slots"] > 0 and any(drafts for _, drafts, _ in rows),
        "shared prefix hit": local_hits,
        "padding": any(placeholders for _, _, placeholders in rows),
        "chunked prefill": any(_chunks(scenario, step) for step in steps),
        "long prefill threshold": engine["long_prefill_token_threshold"] > 0,
        "max_model_len reached": ended and any(_ends_at(r) >= engine["max_model_len"] for r in requests),
    }
    return {kind for kind, seen in happened.items() if seen}


def _prompt_length(request: dict[str, Any]) -> int:
    prompt = request["prompt"]
    return len(prompt) if isinstance(prompt, list) else int(prompt["len"])


def _ends_at(request: dict[str, Any]) -> int:
    return _prompt_length(request) + int(request["max_tokens"])


def _chunks(scenario: Scenario, step: Step) -> bool:
    """Whether a row of ``step`` left part of a prompt to later steps."""
    return any(
        r["id"] in step["rows"] and step["computed"].get(r["id"], _prompt_length(r)) < _prompt_length(r)
        for r in scenario["requests"]
    )


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    """The stored scenarios, each replayed beside vLLM's answers."""
    result = Comparison()
    for scenario, steps, error in load():
        outcome = compare(scenario, steps, error)
        result.scenarios += 1
        result.steps += outcome.steps
        if outcome.difference:
            result.differences.append(outcome.difference)
        elif outcome.departure:
            result.departures.update(outcome.departure)
        else:
            result.clean_scenarios += 1
            result.clean.update(kinds(scenario, steps, outcome.local_hits))
    return result


def test_no_decision_differs_before_a_departure(comparison: Comparison) -> None:
    shown = "\n".join(comparison.differences[:5])
    assert not comparison.differences, f"{len(comparison.differences)} scenarios differ, the first:\n{shown}"
    assert comparison.scenarios == header()["scenarios"]


def test_enough_scenarios_agree_to_their_end(comparison: Comparison) -> None:
    assert comparison.clean_scenarios >= LEAST_CLEAN, comparison.departures


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_among_those_that_agree_to_their_end(comparison: Comparison, kind: str) -> None:
    assert comparison.clean[kind] >= LEAST_OF_A_KIND, comparison.clean


def test_departures_that_trigger_are_named_with_a_reason(comparison: Comparison) -> None:
    assert set(comparison.departures) <= set(REASONS)


def test_stored_scenarios_are_what_the_generator_makes() -> None:
    head = header()
    for (scenario, steps, _), index in zip(load(), range(head["first"], head["first"] + 20), strict=False):
        assert scenario == generate(head["seed"], index)
        assert unpack(scenario, pack(scenario, steps)) == steps


def test_a_changed_answer_is_reported_with_scenario_step_and_both_sides() -> None:
    scenario, steps, error = next(load())
    last = len(steps) - 1
    changed = [*steps[:-1], {**steps[-1], "free_blocks": steps[-1]["free_blocks"] + 1}]
    found = compare(scenario, changed, error).difference
    assert f"scenario {scenario['id']}, step {last}: differs in free_blocks" in found
    assert "ours: " in found
    assert "vLLM: " in found
