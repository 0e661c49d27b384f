# SPDX-License-Identifier: Apache-2.0
"""What a scheduler counts."""

from __future__ import annotations

from collections import Counter

from paceline.core.verifier import AcceptanceStats


class SchedulerStats:
    """Totals since the start. ``misses``: steps with rows that were not uniform W, by reason.

    ``idle_admissions``: requests admitted while none was running. ``departures``: decisions that vLLM 0.32 would have
    taken otherwise, by name (see `core.departures`).
    """

    __slots__ = (
        "acceptance",
        "busy_steps",
        "departures",
        "generated_tokens",
        "idle_admissions",
        "late_transfers",
        "load_failures",
        "misses",
        "preemptions",
        "prefix_hits",
        "prefix_queries",
        "external_hits",
        "prompt_tokens",
        "uniform_steps",
    )

    def __init__(self, num_speculative_tokens: int) -> None:
        self.acceptance = AcceptanceStats(num_speculative_tokens)
        self.misses: Counter[str] = Counter()
        self.departures: Counter[str] = Counter()
        self.busy_steps = 0
        self.uniform_steps = 0
        self.idle_admissions = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.external_hits = 0
        self.load_failures = 0
        self.late_transfers = 0
