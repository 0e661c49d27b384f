# SPDX-License-Identifier: Apache-2.0
"""The laboratory beside the real line: the same load on a virtual clock, with the costs that a profile gives."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paceline.bench.line import AFTER, BEFORE, LineOptions, LineResult, Profile
from paceline.core.config import CacheConfig, GraphConfig, SchedulerConfig, SpeculationConfig
from paceline.sim.cluster import RunReport, simulate
from paceline.sim.scenario import Cluster, Connector, Cost, Scenario, Seeds


@dataclass(frozen=True, slots=True)
class Expected:
    """One side at one rate: a run per round, with the seed of the real one. Figures are medians over the runs."""

    runs: tuple[RunReport, ...]

    def median(self, measure: str) -> float:
        return statistics.median(getattr(run, measure) for run in self.runs)


@dataclass(frozen=True, slots=True)
class Simulated:
    """What the laboratory expects, by request rate. ``cost``: what a step was said to take."""

    cost: Cost
    before: dict[float, Expected]
    after: dict[float, Expected]

    def to_json(self) -> dict[str, Any]:
        names = ("p50_itl_ms", "p99_itl_ms", "full_step_share", "group_steps", "acceptance_length")

        def side(expected: Expected) -> dict[str, Any]:
            misses = sum((Counter(run.misses) for run in expected.runs), Counter())
            return {**{name: expected.median(name) for name in names}, "misses": dict(misses)}

        cost = {name: getattr(self.cost, name) for name in ("step_base_ms", "per_group_row_ms", "eager_step_ms")}
        return {
            "cost": cost,
            "rates": [
                {"request_rate": rate, "before": side(self.before[rate]), "after": side(self.after[rate])}
                for rate in self.before
            ],
        }


def fit_cost(profile: Profile) -> Cost:
    """A step's cost in ms from median ITLs by requests in flight, by least squares.

    With the requests spread evenly, rows of the busiest rank and rows of the group grow together, so one of the two
    is enough: FULL = base + rows x per row, eager = eager base + rows x the same.

    Raises:
        ValueError: fewer than two loads were profiled.
    """
    counts = sorted(profile.full.keys() & profile.eager.keys())
    if len(counts) < 2:
        raise ValueError(f"a profile of at least two loads is needed, got {counts}")
    rows = np.array(counts * 2, dtype=float)
    eager = np.array([0.0] * len(counts) + [1.0] * len(counts))
    took = np.array([profile.full[c] for c in counts] + [profile.eager[c] for c in counts])
    design = np.stack((1.0 - eager, eager, rows), 1)
    (base, eager_base, per_row), *_ = np.linalg.lstsq(design, took, rcond=None)
    if per_row < 0:
        per_row, base, eager_base = 0.0, took[eager == 0].mean(), took[eager == 1].mean()
    return Cost(step_base_ms=float(base), eager_step_ms=float(eager_base), per_busiest_row_ms=0.0,
                per_group_row_ms=float(per_row))  # fmt: skip


def scenario_of(options: LineOptions, rate: float, pad_resumed: str, cost: Cost) -> Scenario:
    """What `LineOptions.server_arguments` starts and `LineOptions.workload` sends, as a scenario."""
    speculation: Mapping[str, Any] = options.speculation(pad_resumed)
    workload = options.workload(rate, options.num_prompts, None)
    return Scenario(
        name="line",
        scheduler=SchedulerConfig(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_seqs * options.width,
            max_model_len=options.max_model_len,
        ),
        cache=CacheConfig(block_size=options.block_size, num_blocks=options.num_blocks, enable_prefix_caching=False),
        speculation=SpeculationConfig(**{**speculation, "synthetic_acceptance_rates": options.acceptance}),
        graphs=GraphConfig(mode="FULL_DECODE_ONLY"),
        cluster=Cluster(nodes=1, ranks_per_node=options.ranks),
        connector=Connector(name="DecodeBenchConnector"),
        workload=replace(workload, seed=0),  # set per run, from the seeds
        seeds=Seeds(base=options.seed, stride=1),
        cost=cost,
    )


def simulate_line(result: LineResult) -> Simulated | None:
    """The same rates on the virtual clock; None if no profile was taken."""
    if result.profile is None:
        return None
    cost = fit_cost(result.profile)

    def side(pad_resumed: str) -> dict[float, Expected]:
        options = result.options
        return {
            rate: Expected(
                tuple(simulate(scenario_of(options, rate, pad_resumed, cost), turn) for turn in range(options.rounds))
            )
            for rate in options.request_rates
        }

    return Simulated(cost, side(BEFORE), side(AFTER))
