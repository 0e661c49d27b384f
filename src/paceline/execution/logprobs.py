# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of sampled tokens, under the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.plan import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Scoring:
    """A row that wants log-probabilities: its logits begin at ``first``, ``tokens`` were sampled there in order.

    ``num_top``: alternatives per token; -1: the whole vocabulary.
    """

    first: int
    tokens: tuple[int, ...]
    num_top: int


def score(logits: Tensor, rows: Sequence[Scoring]) -> list[tuple[TokenLogprobs, ...]]:
    """Log-softmax of the raw ``logits`` [positions, vocabulary] at each token, with the best alternatives.

    Rows that ask for the same number of alternatives are searched together; which of equal logits are found does not
    depend on the other rows.
    """
    results: list[tuple[TokenLogprobs, ...]] = [()] * len(rows)
    vocabulary = logits.shape[-1]
    asked = [vocabulary if row.num_top < 0 else min(row.num_top, vocabulary) for row in rows]
    for num_top in dict.fromkeys(asked):
        members = [i for i, n in enumerate(asked) if n == num_top]
        positions = [rows[i].first + j for i in members for j in range(len(rows[i].tokens))]
        tokens = [token for i in members for token in rows[i].tokens]
        entries = iter(_score_positions(logits[positions], tokens, num_top))
        for i in members:
            results[i] = tuple(next(entries) for _ in rows[i].tokens)
    return results


def _score_positions(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """``logits`` [tokens, vocabulary], one row per token."""
    total = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = (1 + (logits > own).sum(-1)).tolist()
    values, ids = logits.topk(num_top, -1)
    tops = (values - total).tolist(), ids.tolist()
    return [
        TokenLogprobs(token, logprob, tuple(zip(likely, scores, strict=True)), rank)
        for token, logprob, scores, likely, rank in zip(tokens, (own - total)[:, 0].tolist(), *tops, ranks, strict=True)
    ]
