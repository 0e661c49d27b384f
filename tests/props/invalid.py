# SPDX-License-Identifier: Apache-2.0
"""Results that no executor may return."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import msgspec

from paceline.core.plan import StepPlan, StepResult


def spoil(plan: StepPlan, result: StepResult, num_speculative_tokens: int, rng: Random) -> StepResult:
    """One of the ways in which ``result`` could be wrong for ``plan``."""
    return rng.choice(list(_ways(plan, result, num_speculative_tokens)))


def _ways(plan: StepPlan, result: StepResult, K: int) -> Iterator[StepResult]:
    change = msgspec.structs.replace
    sampled, errors = list(result.sampled), dict(result.errors or {})
    yield change(result, step=plan.step + 1)
    yield change(result, sampled=[*sampled, (1,)])
    yield change(result, errors={**errors, len(plan.rows): "no such row"})
    yield change(result, errors={**errors, -1: "no such row"})
    yield change(result, failed_loads={len(plan.rows): ()})
    yield change(result, next_drafts=[*result.next_drafts, ()] if plan.rows else [()])
    if plan.rows:
        yield change(result, sampled=sampled[:-1])
        yield change(result, next_drafts=[(0,) * (K + 1)] + [()] * (len(plan.rows) - 1))
        yield change(result, next_drafts=[(-1,)] + [()] * (len(plan.rows) - 1))
    for i, row in enumerate(plan.rows):

        def with_tokens(tokens: tuple[int, ...], i: int = i) -> StepResult:
            return change(result, sampled=[*sampled[:i], tokens, *sampled[i + 1 :]])

        if not row.samples:
            yield with_tokens((1,))
            continue
        if i in errors:
            yield with_tokens((1,))
            continue
        yield with_tokens(())
        yield with_tokens((-1,))
        yield with_tokens((*row.drafts, 1, 1))
        yield change(result, errors={**errors, i: "beside its tokens"})
        yield change(result, failed_loads={i: ()})
        if row.drafts:
            yield with_tokens((row.drafts[0] + 1, 1))
            if -1 in row.drafts:
                at = row.drafts.index(-1)
                yield with_tokens((*row.drafts[: at + 1], 1))
                yield with_tokens((*row.drafts[:at], 0, 1))
