# SPDX-License-Identifier: Apache-2.0
"""How long a step of a group takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from numpy.random import Generator

from paceline.core.graphs import FULL
from paceline.core.lockstep import Agreement
from paceline.core.plan import StepPlan
from paceline.sim.draws import Uniforms
from paceline.sim.scenario import Cost


class CostModel(Protocol):
    """The duration of a step is a property of the group, not of a rank."""

    def step_s(self, plans: Sequence[StepPlan], agreement: Agreement) -> float:
        """Seconds from launch to collect."""
        ...


class LinearCost:
    """Base + busiest rank's rows + the group's rows + the largest fill, times one-sided jitter.

    An eager step replaces the base: launching each kernel from the host hides everything that a graph replay would
    show, so it is a constant of its own.
    """

    __slots__ = ("_base_s", "_busiest_s", "_eager_s", "_fill_s", "_jitter", "_row_s", "_uniform")

    def __init__(self, cost: Cost, rng: Generator) -> None:
        self._base_s = cost.step_base_ms / 1000
        self._eager_s = cost.eager_step_ms / 1000
        self._busiest_s = cost.per_busiest_row_ms / 1000
        self._row_s = cost.per_group_row_ms / 1000
        self._fill_s = cost.fill_per_100k_tokens_ms / 1000 / 100_000
        self._jitter = cost.jitter
        self._uniform = Uniforms(rng)

    def step_s(self, plans: Sequence[StepPlan], agreement: Agreement) -> float:
        busiest = rows = filled = 0
        for plan in plans:
            n = len(plan.rows)
            if n:
                rows += n
                if n > busiest:
                    busiest = n
                if plan.load_meta:
                    filled = max(filled, sum(fill.tokens for fill in plan.load_meta))
        base = self._base_s if agreement.mode == FULL else self._eager_s
        seconds = base + busiest * self._busiest_s + rows * self._row_s + filled * self._fill_s
        return seconds * (1.0 + self._jitter * self._uniform.next())
