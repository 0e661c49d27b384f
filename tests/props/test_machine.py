# SPDX-License-Identifier: Apache-2.0
"""Any order of operations on a scheduler, with every invariant checked after each."""

from __future__ import annotations

import sys
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from paceline.core.scheduler import RequestRefused, Scheduler

from .scenarios import Requests, check_end, random_config, random_world
from .transport import NEVER

SETTINGS = settings(
    max_examples=200,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate, Phase.shrink),  # not: explain, which takes minutes here
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, leave, are sent back and read; transfers hurry or freeze; steps are planned and committed.

    The numbers that hypothesis draws choose the configuration and the operations; ``seed`` makes the model's, the
    drafter's and the network's answers.
    """

    @initialize(setting=st.integers(0, 10**6), seed=st.integers(0, 10**6))
    def start(self, setting: int, seed: int) -> None:
        config = random_config(Random(setting))
        self.world = random_world(Random(seed), config)
        self.made = Requests(Random(seed + 1), config)

    def _one_of(self, number: int, names: list[str]) -> str:
        return names[number % len(names)]

    @property
    def s(self) -> Scheduler:
        return self.world.scheduler

    @rule(count=st.integers(1, 4))
    def add(self, count: int) -> None:
        for _ in range(count):
            if len(self.s.requests) < 12:
                request = self.made.request(self.world.now)
                self.world.add(request, self.made.offer(request))

    @precondition(lambda self: self.s.requests)
    @rule(number=st.integers(0, 100))
    def add_again(self, number: int) -> None:
        """An id in use is refused and changes nothing."""
        request = self.made.request(self.world.now)
        request.id = self._one_of(number, list(self.s.requests))
        with pytest.raises(RequestRefused, match="in use"):
            self.s.add(request)

    @precondition(lambda self: self.s.requests)
    @rule(number=st.integers(0, 100))
    def abort(self, number: int) -> None:
        """Between steps, or between plan and commit."""
        self.world.abort(self._one_of(number, list(self.s.requests)))

    @rule()
    def abort_unknown(self) -> None:
        self.world.abort("nobody")

    @precondition(lambda self: self.world.plan is None and self.world.preemptible())
    @rule(number=st.integers(0, 100))
    def preempt(self, number: int) -> None:
        self.world.preempt(self._one_of(number, self.world.preemptible()))

    @precondition(lambda self: self.world.plan is not None and self.s.running)
    @rule()
    def preempt_too_late(self) -> None:
        with pytest.raises(ValueError, match="request_id"):
            self.s.preempt(self.s.running[0].id)

    @precondition(lambda self: self.world.plan is None and self.world.fenceable())
    @rule(number=st.integers(0, 100), steps=st.integers(0, 8))
    def fence(self, number: int, steps: int) -> None:
        running = self.world.fenceable()
        self.world.fence(running[number % len(running)], steps)

    @precondition(lambda self: self.world.transport.under_way)
    @rule(number=st.integers(0, 100), steps=st.sampled_from((0, 0, 1, 2)))
    def hurry(self, number: int, steps: int) -> None:
        """A transfer will end in one of the next steps."""
        transfers = self.world.transport.under_way
        transfers[number % len(transfers)].ends_at = self.world.step + steps

    @precondition(lambda self: any(t.is_load for t in self.world.transport.under_way))
    @rule()
    def freeze(self) -> None:
        """A load's peer no longer answers."""
        next(t for t in self.world.transport.under_way if t.is_load).ends_at = NEVER

    @precondition(lambda self: self.world.plan is None)
    @rule()
    def take_pending(self) -> None:
        self.world.take_pending()

    @precondition(lambda self: self.world.plan is None)
    @rule()
    def plan(self) -> None:
        self.world.begin()

    @precondition(lambda self: self.world.plan is not None)
    @rule()
    def commit(self) -> None:
        self.world.commit()

    @precondition(lambda self: self.world.plan is not None)
    @rule()
    def commit_after_an_invalid_result(self) -> None:
        self.world.commit(invalid_first=True)

    @precondition(lambda self: self.world.plan is None)
    @rule(count=st.integers(1, 5))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.world.begin()
            self.world.commit()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        """Whatever was done before, everything ends."""
        if not hasattr(self, "world") or sys.exc_info()[0] is not None:
            return
        world = self.world
        if world.plan is not None:
            world.commit()
        limit = world.step + 2000
        while self.s.has_work:
            world.begin()
            world.commit()
            assert world.step < limit, list(self.s.requests.values())
        check_end(world)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = SETTINGS


@pytest.mark.long
def test_many_orders_of_operations() -> None:
    run_state_machine_as_test(SchedulerMachine, settings=settings(SETTINGS, max_examples=5000, stateful_step_count=80))
