# SPDX-License-Identifier: Apache-2.0
"""Verification of drafts: how many a row accepts, and the model's own token after them.

Lossless verification (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023) leaves
the distribution of the output as it is without drafts: that of the model at the request's temperature, cut by its
filters; penalties are in the logits before. Synthetic verification accepts at given rates, whatever
the model says, and serves benchmarks.

A placeholder draft (-1) is rejected before anything is looked up for it, under every method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.execution.sampler import Filters, Purpose, draw, filtered, probabilities, uniform


@dataclass(frozen=True, slots=True)
class Verification:
    """One row to verify: logits of its 1 + len(drafts) last positions, from row ``first`` of the batch on.

    ``position``: index of the first token to choose among the request's output tokens. ``q``: the drafter's
    distribution at each draft [drafts, vocabulary], None for a greedy drafter, whose q is one-hot. ``filters``: what is
    kept of the distribution, None: all.
    """

    first: int
    drafts: tuple[int, ...]
    temperature: float
    seed: int
    position: int
    q: Tensor | None = None
    filters: Filters | None = None

    def number(self, offset: int, purpose: Purpose) -> float:
        """The random number for the token ``offset`` places after the first."""
        return uniform(self.seed, self.position + offset, purpose)


def verify(
    logits: Tensor, best: Sequence[int], rows: Sequence[Verification], synthetic: Sequence[float] | None = None
) -> list[tuple[int, ...]]:
    """Accepted drafts and one token of the model, for each row.

    Args:
        logits: [positions, vocabulary] of all rows.
        best: the argmax of each position.
        rows: what to verify; temperature 0 is greedy.
        synthetic: for benchmarks, c_i = P(draft i is accepted | all before it were), one per draft.
    """
    result: list[tuple[int, ...]] = [()] * len(rows)
    sampled = []
    for i, row in enumerate(rows):
        if row.temperature > 0.0:
            sampled.append(i)
        else:
            own = best[row.first : row.first + len(row.drafts) + 1]
            accepted = _accepted_greedily(row, own) if synthetic is None else accepted_at_rates(row, synthetic)
            result[i] = (*row.drafts[:accepted], own[accepted])
    if sampled:
        chosen = _verify_sampled(logits, [rows[i] for i in sampled], synthetic)
        for i, tokens in zip(sampled, chosen, strict=True):
            result[i] = tokens
    return result


def _accepted_greedily(row: Verification, own: Sequence[int]) -> int:
    """Length of the longest prefix of drafts equal to the model's own choices (never negative ids)."""
    accepted = 0
    for draft, token in zip(row.drafts, own, strict=False):
        if draft != token:
            break
        accepted += 1
    return accepted


def accepted_counts(best: Tensor, drafts: Tensor, numbers: Tensor, rates: Tensor | None) -> Tensor:
    """How many drafts each row accepts [rows], int64, decided where the logits are: what `verify` does, for rows that
    are greedy, without a word to the host.

    Args:
        best: the argmax of each position [rows, 1 + drafts].
        drafts: [rows, drafts]; a placeholder equals no argmax.
        numbers: float64 [rows, drafts], the random number of each draft under ``rates``.
        rates: float64 [drafts], see `verify`; None: drafts are accepted that are right.
    """
    right = drafts == best[:, :-1] if rates is None else (drafts >= 0) & (numbers < rates)
    return right.to(torch.int64).cumprod(1).sum(1)


def accepted_at_rates(row: Verification, rates: Sequence[float]) -> int:
    """Accept draft i while u < c_i, up to the first placeholder."""
    for i, draft in enumerate(row.drafts):
        if draft < 0 or row.number(i, Purpose.ACCEPT) >= rates[i]:
            return i
    return len(row.drafts)


def _verify_sampled(
    logits: Tensor, rows: Sequence[Verification], synthetic: Sequence[float] | None
) -> list[tuple[int, ...]]:
    positions = [p for row in rows for p in range(row.first, row.first + len(row.drafts) + 1)]
    p = probabilities(logits[positions], [row.temperature for row in rows for _ in range(len(row.drafts) + 1)])
    cut = [row.filters for row in rows for _ in range(len(row.drafts) + 1)]
    if places := [i for i, f in enumerate(cut) if f is not None]:
        p[places] = filtered(p[places], [f for f in cut if f is not None])
    counts, finals, numbers = [], [], []
    first = 0
    for row in rows:
        own = p[first : first + len(row.drafts) + 1]
        first += len(own)
        if synthetic is None:
            accepted, final = _accept(own, row)
        else:
            accepted = accepted_at_rates(row, synthetic)
            final = own[accepted]
        counts.append(accepted)
        finals.append(final)
        numbers.append(row.number(accepted, Purpose.SAMPLE))
    tokens = draw(torch.stack(finals), numbers)
    return [(*row.drafts[:a], token) for row, a, token in zip(rows, counts, tokens, strict=True)]


def _accept(p: Tensor, row: Verification) -> tuple[int, Tensor]:
    """Accepted drafts, and the weights from which the next token is drawn.

    Draft x is accepted with probability min(1, p(x) / q(x)); after a rejection the token comes from the positive
    part of p - q, after a placeholder or when all are accepted from p itself.
    """
    for i, draft in enumerate(row.drafts):
        if draft < 0:
            return i, p[i]
        q = row.q[i] if row.q is not None else None
        offered = 1.0 if q is None else float(q[draft])
        if row.number(i, Purpose.ACCEPT) * offered >= float(p[i, draft]):
            return i, residual(p[i], draft, q)
    return len(row.drafts), p[len(row.drafts)]


def residual(p: Tensor, draft: int, q: Tensor | None) -> Tensor:
    """The positive part of p - q, not normalised; p where nothing is left of it (p = q but for rounding)."""
    if q is None:
        rest = p.clone()
        rest[draft] = 0.0
    else:
        rest = (p - q).clamp_(min=0.0)
    return rest if bool(rest.sum() > 0) else p
