# SPDX-License-Identifier: Apache-2.0
"""How fast the laboratory runs, on one core."""

from __future__ import annotations

import time
from typing import Any

from paceline.sim.cluster import simulate
from paceline.sim.scenario import load

RATES = (2, 4, 6)
"""Requests per second."""
REPEATS = 3


def run(scenario: str = "kimi_k3_dep16") -> dict[str, Any]:
    """Busy rank-steps (a rank with at least one row) per second at `RATES`, metrics on; best of three.

    Steps and seconds are those of whole runs, warm-ups included. The last row is all rates together. Raises
    `ConfigError` for a scenario that cannot be, `SimulationStuck` for one that cannot end.
    """
    rows = []
    steps, seconds = 0, 0.0
    for rate in RATES:
        loaded = load(scenario, {"workload.request_rate": rate})
        simulate(loaded, 0)
        best = float("inf")
        for _ in range(REPEATS):
            began = time.perf_counter()
            report = simulate(loaded, 0)
            best = min(best, time.perf_counter() - began)
        rows.append(_row(str(rate), report.busy_rank_steps, best))
        steps += report.busy_rank_steps
        seconds += best
    rows.append(_row("all", steps, seconds))
    return {"scenario": scenario, "rows": rows, "busy_rank_steps_per_s": steps / seconds}


def _row(rate: str, busy: int, seconds: float) -> dict[str, Any]:
    return {
        "request_rate": rate,
        "busy_rank_steps": busy,
        "wall_s": seconds,
        "busy_rank_steps_per_s": busy / seconds,
    }
