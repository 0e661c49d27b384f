# SPDX-License-Identifier: Apache-2.0
"""Speculation as the server itself counts it, from its Prometheus metrics before and after a run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from paceline.core.results import SpeculationCounts

PREFIX = "vllm:spec_decode_"
DRAFTS = f"{PREFIX}num_drafts_total"
DRAFT_TOKENS = f"{PREFIX}num_draft_tokens_total"
ACCEPTED = f"{PREFIX}num_accepted_tokens_total"
ACCEPTED_PER_POSITION = f"{PREFIX}num_accepted_tokens_per_pos_total"

_SAMPLE = re.compile(rf"^({PREFIX}\w+)(?:\{{(.*)\}})?\s+(\S+)", re.MULTILINE)
_POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')


@dataclass(slots=True)
class Counters:
    """Sums over all engines of a server since its start."""

    totals: dict[str, float] = field(default_factory=dict)
    per_position: dict[int, float] = field(default_factory=dict)


def read_counters(text: str) -> Counters | None:
    """The speculation counters in Prometheus text; None if the server has none."""
    found = Counters()
    for name, labels, value in _SAMPLE.findall(text):
        if name == ACCEPTED_PER_POSITION:
            if position := _POSITION.search(labels):
                at = int(position.group(1))
                found.per_position[at] = found.per_position.get(at, 0.0) + float(value)
        elif name in (DRAFTS, DRAFT_TOKENS, ACCEPTED):
            found.totals[name] = found.totals.get(name, 0.0) + float(value)
    return found if found.totals else None


def speculation_between(before: Counters | None, after: Counters | None) -> SpeculationCounts | None:
    """What was drafted and accepted between two readings; None if nothing was, or one is missing.

    A server that was restarted in between counts from 0 again; then nothing can be said either.
    """
    if before is None or after is None:
        return None

    def gained(name: str) -> int:
        return round(after.totals.get(name, 0.0) - before.totals.get(name, 0.0))

    drafts, draft_tokens, accepted = gained(DRAFTS), gained(DRAFT_TOKENS), gained(ACCEPTED)
    if drafts <= 0 or draft_tokens <= 0 or accepted < 0:
        return None
    positions = range(1 + max(after.per_position, default=-1))
    per_position = (after.per_position.get(i, 0.0) - before.per_position.get(i, 0.0) for i in positions)
    return SpeculationCounts(drafts, draft_tokens, accepted, tuple(map(round, per_position)))
