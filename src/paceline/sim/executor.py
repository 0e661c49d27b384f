# SPDX-License-Identifier: Apache-2.0
"""An executor without a model: it accepts drafts at the configured rates and samples token 0."""

from __future__ import annotations

from bisect import bisect_right

from numpy.random import Generator

from paceline.core.config import SpeculationConfig
from paceline.core.lockstep import Agreement
from paceline.core.plan import StepPlan, StepResult
from paceline.core.verifier import acceptance_rates
from paceline.sim.draws import Uniforms

NO_TOKEN: tuple[int, ...] = ()


class SimExecutor:
    """Returns the result of any plan at once; time is the group's affair.

    Drafts are accepted with the scenario's synthetic rates r_i = P(the first i + 1 are accepted): with one uniform u
    per row, as many as there are r_i > u. Placeholders are rejected.
    """

    __slots__ = ("_K", "_drafts", "_nexts", "_plan", "_rates", "_tokens", "_uniform")

    def __init__(self, speculation: SpeculationConfig, rng: Generator) -> None:
        self._K = speculation.num_speculative_tokens
        self._rates = sorted(acceptance_rates(speculation)) if self._K else []
        self._uniform = Uniforms(rng).next
        self._tokens = [(0,) * (accepted + 1) for accepted in range(self._K + 1)]
        self._drafts = (0,) * self._K
        self._nexts: list[list[tuple[int, ...]]] = [[]]
        self._plan = StepPlan(-1, (), 0, 0)

    def launch(self, plan: StepPlan, agreement: Agreement | None) -> None:
        self._plan = plan

    def collect(self) -> StepResult:
        plan, K = self._plan, self._K
        if not plan.rows:
            return StepResult(plan.step, ())
        rates, tokens, uniform = self._rates, self._tokens, self._uniform
        sampled = []
        for row in plan.rows:
            drafts = row.drafts
            if not drafts or drafts[0] < 0:
                sampled.append(tokens[0] if row.samples else NO_TOKEN)
                continue
            accepted = K - bisect_right(rates, uniform())
            if accepted and drafts[-1] < 0:
                accepted = min(accepted, drafts.index(-1))
            sampled.append(tokens[min(accepted, len(drafts))])
        count = len(sampled)
        while len(self._nexts) <= count:
            self._nexts.append([self._drafts] * len(self._nexts))
        return StepResult(plan.step, sampled, self._nexts[count])
