# SPDX-License-Identifier: Apache-2.0
"""Ranks in step on a virtual clock, with executors that follow a script instead of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.core.config import CacheConfig, EngineConfig, GraphConfig, SchedulerConfig, SpeculationConfig
from paceline.core.connector import SchedulerConnector
from paceline.core.graphs import GraphDispatcher
from paceline.core.lockstep import RUN, SLEEP, Agreement
from paceline.core.plan import PLACEHOLDER, StepOutput, StepPlan, StepResult, TransferEvent
from paceline.core.request import Request, SamplingParams, StoredTokens
from paceline.core.scheduler import Scheduler
from paceline.engine.group import Group
from paceline.engine.rank import Rank

K, W = 3, 4
DRAFT, MODEL = 7, 5


def config(*, method: Any = "ngram", mml: int = 200, budget: int = 64, **scheduler: Any) -> EngineConfig:
    return EngineConfig(
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget, max_model_len=mml, **scheduler),
        cache=CacheConfig(num_blocks=100, block_size=16, enable_prefix_caching=False),
        speculation=SpeculationConfig(method=method, num_speculative_tokens=K),
        graphs=GraphConfig(mode="FULL_DECODE_ONLY"),
    )


class Loads:
    """A connector's scheduler half: it can provide the first ``prefix[id]`` tokens of a request."""

    def __init__(self, prefix: dict[str, int], *, asynchronous: bool) -> None:
        self.prefix = prefix
        self.asynchronous = asynchronous

    def get_num_new_matched_tokens(self, request: Request, num_computed: int) -> tuple[int, bool]:
        extra = max(0, self.prefix.get(request.id, 0) - num_computed)
        return extra, self.asynchronous and extra > 0

    def update_state_after_alloc(self, request: Request, blocks: Sequence[Sequence[int]], num_external: int) -> None:
        pass

    def build_connector_meta(self, plan: StepPlan) -> None:
        return None

    def request_finished(self, request: Request, blocks: Sequence[Sequence[int]]) -> tuple[bool, None]:
        return False, None


class ScriptedExecutor:
    """Accepts every real draft, proposes as many as ``drafts()`` says, and reports ``events`` once."""

    def __init__(self) -> None:
        self.drafts: Callable[[], int] = lambda: K
        self.events: list[TransferEvent] = []
        self.errors: dict[int, str] = {}
        self.launched: list[tuple[StepPlan, Agreement | None]] = []

    def launch(self, plan: StepPlan, agreement: Agreement | None) -> None:
        self.launched.append((plan, agreement))

    def collect(self) -> StepResult:
        plan, _ = self.launched[-1]
        sampled, nexts = [], []
        for i, row in enumerate(plan.rows):
            real = tuple(d for d in row.drafts if d != PLACEHOLDER)
            sampled.append((*real, MODEL) if row.samples and i not in self.errors else ())
            nexts.append((DRAFT,) * self.drafts() if row.samples else ())
        events, self.events = self.events, []
        errors, self.errors = self.errors, {}
        return StepResult(plan.step, sampled, nexts, errors=errors or None, transfers=events)


class Fleet:
    """A group of ranks, and what came out of them."""

    def __init__(
        self, ranks: int, engine: EngineConfig | None = None, connectors: Sequence[SchedulerConnector | None] = ()
    ) -> None:
        engine = engine or config()
        graphs = GraphDispatcher(engine)
        self.executors = [ScriptedExecutor() for _ in range(ranks)]
        halves = list(connectors) or [None] * ranks
        self.ranks = [
            Rank(Scheduler(engine, half), executor, graphs)
            for half, executor in zip(halves, self.executors, strict=True)
        ]
        self.group = Group(self.ranks, graphs)
        self.now = 0.0
        self.outputs: list[tuple[int, StepOutput]] = []
        self.agreements: list[Agreement] = []

    def add(self, rank: int, name: str, prompt: int, max_tokens: int = 20) -> Request:
        request = Request(name, StoredTokens(range(prompt)), SamplingParams(max_tokens=max_tokens), arrival=self.now)
        self.ranks[rank].add(request)
        self.group.wake()
        return request

    def step(self) -> Agreement:
        """One step of the group; a sleeping group is left asleep."""
        agreement = self.begin()
        if agreement.run != SLEEP:
            self.finish()
        return agreement

    def begin(self) -> Agreement:
        agreement = self.group.begin(self.now)
        self.agreements.append(agreement)
        return agreement

    def finish(self) -> None:
        self.now += 0.03
        for rank, outputs in enumerate(self.group.finish(self.now)):
            self.outputs += [(rank, output) for output in outputs]

    def run(self, limit: int = 200) -> list[Agreement]:
        """Steps until the group sleeps; returns those with rows."""
        steps: list[Agreement] = []
        for _ in range(limit):
            agreement = self.step()
            if agreement.run == SLEEP:
                return steps
            if agreement.run == RUN:
                steps.append(agreement)
        raise AssertionError(f"still awake after {limit} steps")

    def ended(self) -> dict[str, str]:
        return {o.request_id: o.finish_reason for _, o in self.outputs if o.finish_reason}

    def loaded(self, rank: int, request: Request, error: str | None = None) -> TransferEvent:
        """The load of ``request`` ends during the next step of ``rank``."""
        event = TransferEvent("loaded", request.seq, request.generation, error=error)
        self.executors[rank].events.append(event)
        return event
