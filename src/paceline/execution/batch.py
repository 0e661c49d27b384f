# SPDX-License-Identifier: Apache-2.0
"""The rows of a step as one flat batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.plan import Row
from paceline.execution.attention import RowSpan, batch_order
from paceline.execution.kvcache import Array
from paceline.execution.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of a step in the order in which their tokens stand in the batch.

    ``indices``: each row's place in the plan. ``firsts``: where each row's tokens begin in the batch. ``tokens`` and
    ``positions``, int64 [tokens], are in main memory.
    """

    indices: list[int]
    rows: list[Row]
    states: list[SequenceState]
    spans: list[RowSpan]
    firsts: list[int]
    tokens: Array
    positions: Array

    @classmethod
    def of(cls, plan_rows: Sequence[Row], states: Sequence[SequenceState], block_size: int) -> Batch:
        """``states``: of the sequence of each row.

        Raises:
            PlanMismatch: a row contradicts what is known of its sequence.
        """
        spans = [RowSpan(row.start, row.n, state.table) for row, state in zip(plan_rows, states, strict=True)]
        order = batch_order(spans)
        tokens, positions, firsts, first = [], [], [], 0
        for i in order:
            row = plan_rows[i]
            tokens.append(states[i].inputs(row.start, row.n, row.drafts, row.samples, block_size))
            positions.append(np.arange(row.start, row.start + row.n))
            firsts.append(first)
            first += row.n
        return cls(
            order,
            [plan_rows[i] for i in order],
            [states[i] for i in order],
            [spans[i] for i in order],
            firsts,
            np.concatenate(tokens),
            np.concatenate(positions),
        )
