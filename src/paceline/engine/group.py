# SPDX-License-Identifier: Apache-2.0
"""Ranks in step: all of them plan, vote, agree, run and finish together.

Here all ranks live in one process; the votes are joined by the same `core.lockstep.agree` that ranks in
processes of their own call on the outcome of their all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.graphs import GraphDispatcher
from paceline.core.lockstep import SLEEP, Agreement, Wave, agree
from paceline.core.plan import StepOutput, StepPlan
from paceline.engine.rank import Rank


class Group:
    """Data-parallel ranks that share collectives. A group of one is a rank on its own."""

    def __init__(self, ranks: Sequence[Rank], graphs: GraphDispatcher) -> None:
        self.ranks = list(ranks)
        self.graphs = graphs
        self.wave = Wave()
        self.step = 0
        self.plans: list[StepPlan] = []
        self.agreement: Agreement | None = None

    def wake(self) -> None:
        """New work for a sleeping group begins the next wave; an awake one takes it at its next step."""
        if not self.wave.awake:
            self.wave.at_sleep(new_work=True, wakes=())

    def begin(self, now: float, *, stop: bool = False) -> Agreement:
        """Plan on every rank, join the votes, and start what was agreed. SLEEP starts nothing and ends the wave.

        ``stop``: every rank asks for the end, which comes when the group next sleeps; its owner adds no more requests.
        """
        step, wave = self.step, self.wave.number
        plans, votes = [], []
        for rank in self.ranks:
            plans.append(rank.begin(now))
            votes.append(rank.vote(step, wave, stop=stop))
        self.plans = plans
        self.agreement = agreement = agree(votes, self.graphs)
        self.step = step + 1
        if agreement.run == SLEEP:
            self.wave.sleep()
        else:
            for rank in self.ranks:
                rank.launch(agreement)
        return agreement

    def finish(self, now: float) -> list[list[StepOutput]]:
        """Collect and commit on every rank; outputs per rank."""
        return [rank.finish(rank.collect(), now) for rank in self.ranks]
