# SPDX-License-Identifier: Apache-2.0
"""One rank: a scheduler and an executor, taken through the phases of a step by whoever owns the clock.

    add/abort -> begin(now) -> vote() -> [agree] -> launch(agreement) -> collect() -> finish(result, now)

``launch`` and ``collect`` are apart so that a process with a real all-reduce and a blocking executor, and an event
loop on a virtual clock (collect at launch + cost), drive the same object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from paceline.core.config import EngineConfig
from paceline.core.graphs import NONE, GraphDispatcher
from paceline.core.lockstep import Agreement, Vote, agree
from paceline.core.plan import StepOutput, StepPlan, StepResult, TransferEvent
from paceline.core.request import Request
from paceline.core.stats import SchedulerStats


class SchedulerLike(Protocol):
    """What a rank needs of a scheduler, so that another one can stand in for ours."""

    config: EngineConfig
    stats: SchedulerStats

    @property
    def has_work(self) -> bool: ...

    @property
    def kv_usage(self) -> float: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_quarantined_blocks(self) -> int: ...

    @property
    def departures(self) -> Mapping[str, int]: ...

    def add(self, request: Request) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def plan(self, now: float) -> StepPlan: ...

    def commit(self, result: StepResult, now: float) -> list[StepOutput]: ...

    def end_transfers(self, events: Sequence[TransferEvent]) -> list[StepOutput]: ...


class Executor(Protocol):
    """Computes plans; decides nothing."""

    def launch(self, plan: StepPlan, agreement: Agreement | None) -> None:
        """Start a step; ``agreement`` is None for a rank that shares no collectives."""
        ...

    def collect(self) -> StepResult:
        """Wait for the step and return its result."""
        ...


class StepCounts:
    """What an executor has executed, by graph mode (index `core.graphs.NONE` or `FULL`).

    ``by_mode``: steps with rows. ``dummies_by_mode``: steps without rows of its own, run since other ranks had some.
    ``padding_tokens``: inert tokens that filled FULL steps up to the agreed size.
    """

    __slots__ = ("by_mode", "dummies_by_mode", "padding_tokens")

    def __init__(self) -> None:
        self.by_mode = [0, 0]
        self.dummies_by_mode = [0, 0]
        self.padding_tokens = 0

    def count(self, tokens: int, agreement: Agreement | None) -> None:
        """A step with ``tokens`` tokens of its own (0: a dummy) was executed as agreed (None: eagerly, alone)."""
        mode, size = (NONE, 0) if agreement is None else (agreement.mode, agreement.size)
        (self.by_mode if tokens else self.dummies_by_mode)[mode] += 1
        self.padding_tokens += size and size - tokens


@runtime_checkable
class CountsSteps(Protocol):
    """An executor that counts what it executes."""

    steps: StepCounts


class Rank:
    """One data-parallel rank."""

    __slots__ = ("_draft_passes", "_graphs", "_idle", "executor", "plan", "scheduler")

    def __init__(self, scheduler: SchedulerLike, executor: Executor, graphs: GraphDispatcher | None = None) -> None:
        self.scheduler = scheduler
        self.executor = executor
        config = scheduler.config
        self._graphs = graphs or GraphDispatcher(config)
        uses_passes = config.speculation.method in ("eagle3", "mtp", "draft_model")
        self._draft_passes = config.speculation.num_speculative_tokens if uses_passes else 0
        self._idle = StepPlan(-1, (), 0, 0)
        self.plan = self._idle

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue a request; `core.scheduler.RequestRefused` if it can never run here."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request; takes effect when no step is in flight."""
        self.scheduler.abort(request_id)

    def begin(self, now: float) -> StepPlan:
        """Plan a step at time ``now`` (seconds). From here to `finish` the plan does not change."""
        self.plan = self.scheduler.plan(now) if self.scheduler.has_work else self._idle
        return self.plan

    def vote(self, step: int, wave: int, *, stop: bool = False) -> Vote:
        """What this rank brings to the group's ``step``: its sizes, its shape, and every reason for running eagerly."""
        plan = self.plan
        if not plan.tokens:
            return Vote(step, wave, 0, 0, 0, NONE, plan is not self._idle, 0, stop)
        mode = self._graphs.mode_for(plan.tokens, plan.width)
        return Vote(step, wave, plan.tokens, len(plan.rows), plan.width, mode, True, self._draft_passes, stop)

    def launch(self, agreement: Agreement | None = None) -> None:
        """Start the planned step, as agreed by the group (None: this rank shares no collectives)."""
        self.executor.launch(self.plan, agreement)

    def launch_alone(self) -> None:
        """Start the planned step of a rank that keeps step with nobody: where graphs are on, it agrees with itself."""
        self.launch(agree([self.vote(0, 0)], self._graphs) if self._graphs.enabled else None)

    def collect(self) -> StepResult:
        """Wait for the step."""
        return self.executor.collect()

    def finish(self, result: StepResult, now: float) -> list[StepOutput]:
        """Commit a result; returns what each request gained."""
        if self.plan is self._idle:
            return self.scheduler.end_transfers(result.transfers) if result.transfers else []
        return self.scheduler.commit(result, now)

    def step(self, now: float) -> list[StepOutput]:
        """All phases of a rank on its own, for owners whose clock is real."""
        self.begin(now)
        if self.plan is self._idle:
            return []
        self.launch()
        return self.finish(self.collect(), now)
