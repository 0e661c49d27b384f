# SPDX-License-Identifier: Apache-2.0
"""Plays a scenario on the scheduler, in the shape in which vLLM's answers are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.connectors.decode_bench.scheduler import DecodeBenchScheduler
from paceline.core.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from paceline.core.departures import REFILL
from paceline.core.plan import PLACEHOLDER, Row, StepPlan, StepResult
from paceline.core.request import Request, SamplingParams, State, StoredTokens
from paceline.core.scheduler import Scheduler

from .generate import SAMPLED_TOKEN, Scenario
from .mock_connector import MockConnector
from .record import Step


def engine_config(scenario: Scenario) -> EngineConfig:
    """The configuration that a scenario describes, without decode graphs."""
    engine, K = scenario["engine"], scenario["K"]
    return EngineConfig(
        scheduler=SchedulerConfig(
            max_num_seqs=engine["max_num_seqs"],
            max_num_batched_tokens=engine["max_num_batched_tokens"],
            max_model_len=engine["max_model_len"],
            long_prefill_token_threshold=engine["long_prefill_token_threshold"],
            policy=scenario["policy"],
        ),
        cache=CacheConfig(
            num_blocks=engine["num_blocks"],
            block_size=engine["block_size"],
            enable_prefix_caching=engine["prefix_caching"],
        ),
        speculation=SpeculationConfig(
            method="ngram" if K else None,
            num_speculative_tokens=K,
            lookahead=scenario["lookahead"],
            draft_slots=scenario["draft_slots"],
        ),
    )


def make_request(entry: dict[str, Any]) -> Request:
    """A request as the scenario describes it; its arrival is its step."""
    prompt = entry["prompt"]
    ids = prompt if isinstance(prompt, list) else [prompt["token"]] * prompt["len"]
    return Request(
        entry["id"],
        StoredTokens(ids),
        SamplingParams(max_tokens=entry["max_tokens"], ignore_eos=True),
        arrival=float(entry["step"]),
        priority=entry.get("priority", 0),
    )


class NotedRefills(DecodeBenchScheduler):
    """DecodeBench that notes when it fills a request again, as it does after a preemption and vLLM's does not."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.filled: set[str] = set()
        self.refilled = False

    def get_num_new_matched_tokens(self, request: Request, num_computed: int) -> tuple[int, bool]:
        matched, is_async = super().get_num_new_matched_tokens(request, num_computed)
        self.refilled |= matched > 0 and request.id in self.filled
        return matched, is_async

    def update_state_after_alloc(self, request: Request, blocks: Sequence[Sequence[int]], num_external: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external)
        if num_external:
            self.filled.add(request.id)


class Replay:
    """One scenario under way, step by step.

    ``local_hits``: whether any request was admitted for the first time with tokens of the prefix cache alone.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.entries = {entry["id"]: entry for entry in scenario["requests"]}
        self.connector: Any = None
        if scenario["connector"] == "mock":
            self.connector = MockConnector({i: e["load"] for i, e in self.entries.items() if "load" in e})
        elif scenario["connector"] == "DecodeBenchConnector":
            self.connector = NotedRefills(scenario["engine"]["block_size"])
        self.scheduler = Scheduler(engine_config(scenario), self.connector)
        self.requests: dict[str, Request] = {}
        self.by_seq: dict[int, Request] = {}
        self.verified = dict.fromkeys(self.entries, 0)
        self.drafted = dict.fromkeys(self.entries, 0)
        self.local_hits = False

    def departures(self) -> list[str]:
        """Departures from vLLM so far; the refill is the connector's own, so the scheduler does not see it."""
        noted = set(self.scheduler.departures)
        if isinstance(self.connector, NotedRefills) and self.connector.refilled:
            noted.add(REFILL)
        return sorted(noted)

    def unfinished(self) -> list[Request]:
        """Requests that have arrived and not ended, in order of arrival."""
        return [r for r in self.requests.values() if r.state is not State.FINISHED]

    def step(self, number: int) -> Step:
        """What the scheduler decided in step ``number`` (they come in order), and its state after the commit."""
        now = float(number)
        self._arrive_and_abort(number)
        preemptions = {i: r.num_preemptions for i, r in self.requests.items()}
        plan = self.scheduler.plan(now)
        preempted = [i for i, r in self.requests.items() if r.num_preemptions > preemptions[i]]
        new = [first.request_id for first in plan.first]
        rows = {self.by_seq[row.seq].id: self._shape(row) for row in plan.rows}
        if self.connector is None:
            self.local_hits |= any(row.start > 0 and self.by_seq[row.seq].id in new for row in plan.rows)
        self.scheduler.commit(self._result(plan), now)
        return {
            "rows": rows,
            "new": new,
            "preempted": preempted,
            "running": [r.id for r in self.scheduler.running],
            "waiting": [r.id for r in self.scheduler.waiting],
            "holding": [r.id for r in self.scheduler.holding],
            "computed": {r.id: self._computed(r) for r in self.unfinished()},
            "free_blocks": self.scheduler.pool.num_free,
        }

    def _arrive_and_abort(self, number: int) -> None:
        if isinstance(self.connector, MockConnector):
            self.connector.step = number
        for i, entry in self.entries.items():
            if i not in self.requests and entry["step"] <= number:
                request = self.requests[i] = make_request(entry)
                self.scheduler.add(request)
                self.by_seq[request.seq] = request
        for at, i in self.scenario["aborts"]:
            if at == number and i in self.requests:
                self.scheduler.abort(i)

    @staticmethod
    def _computed(request: Request) -> int:
        """Computed tokens; vLLM counts what a load promises from its start."""
        return request.computed if request.loading is None else request.loading.tokens

    @staticmethod
    def _shape(row: Row) -> list[int]:
        placeholders = row.drafts.count(PLACEHOLDER)
        return [row.n, len(row.drafts) - placeholders, placeholders]

    def _result(self, plan: StepPlan) -> StepResult:
        """What a model with the scenario's acceptance would return."""
        sampled = tuple(self._sample(row) for row in plan.rows)
        drafts = tuple(self._draft(row) for row in plan.rows)
        transfers = self.connector.arrived() if isinstance(self.connector, MockConnector) else ()
        return StepResult(plan.step, sampled, drafts, transfers=transfers)

    def _sample(self, row: Row) -> tuple[int, ...]:
        if not row.samples:
            return ()
        accepted, i = 0, self.by_seq[row.seq].id
        if row.drafts and PLACEHOLDER not in row.drafts:
            cycle = self.entries[i].get("accept", [0])
            accepted = min(cycle[self.verified[i] % len(cycle)], len(row.drafts))
            self.verified[i] += 1
        return (SAMPLED_TOKEN,) * (1 + accepted)

    def _draft(self, row: Row) -> tuple[int, ...]:
        if not row.samples or not self.scenario["K"]:
            return ()
        K, i = self.scenario["K"], self.by_seq[row.seq].id
        cycle = self.entries[i].get("drafts", [K])
        count: int = min(K, cycle[self.drafted[i] % len(cycle)])
        self.drafted[i] += 1
        return (SAMPLED_TOKEN,) * count


@dataclass
class Outcome:
    """How far a scenario was compared: ``departure`` names the first departures, or is empty at the end."""

    steps: int = 0
    departure: list[str] = field(default_factory=list)
    difference: str = ""
    local_hits: bool = False


def compare(scenario: Scenario, answers: list[Step], error: str | None) -> Outcome:
    """Replay ``scenario`` beside vLLM's ``answers`` up to the first departure, difference, or end.

    ``error``: vLLM died after the last answer, so a departure must have come by then.
    """
    outcome, replay = Outcome(), Replay(scenario)
    for number, answer in enumerate(answers):
        ours = replay.step(number)
        outcome.departure = replay.departures()
        if outcome.departure:
            return outcome
        outcome.difference = _difference(scenario, number, ours, answer)
        if outcome.difference:
            return outcome
        outcome.steps += 1
    outcome.local_hits = replay.local_hits
    if error is not None:
        ours = replay.step(len(answers))
        outcome.departure = replay.departures()
        if not outcome.departure:
            outcome.difference = f"scenario {scenario['id']}, step {len(answers)}: vLLM dies ({error}), ours: {ours}"
    elif len(answers) < scenario["steps"] and (left := replay.unfinished()):
        outcome.difference = f"scenario {scenario['id']}: vLLM ends after {len(answers)} steps, ours still has {left}"
    return outcome


def _difference(scenario: Scenario, number: int, ours: Step, theirs: Step) -> str:
    """Empty, or a text with scenario, step and both sides."""
    where = f"scenario {scenario['id']}, step {number}"
    wrong = [key for key in theirs if not _same(key, ours, theirs)]
    if not wrong:
        return ""
    lines = [f"{where}: differs in {', '.join(wrong)}"]
    for side, step in (("ours", ours), ("vLLM", theirs)):
        lines.append(f"  {side}: " + ", ".join(f"{key} {step[key]}" for key in theirs))
    return "\n".join(lines)


def _same(key: str, ours: Step, theirs: Step) -> bool:
    if key == "rows":  # the order of the plan counts
        return list(ours[key].items()) == list(theirs[key].items())
    if key == "preempted":
        return sorted(ours[key]) == sorted(theirs[key])
    return bool(ours[key] == theirs[key])
