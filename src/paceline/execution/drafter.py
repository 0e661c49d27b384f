# SPDX-License-Identifier: Apache-2.0
"""What every drafter is to its executor, and what the drafters with a model of their own have in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.core.graphs import NONE
from paceline.core.lockstep import Agreement
from paceline.core.plan import Row
from paceline.execution.attention import RowSpan, batch_order
from paceline.execution.kvcache import CPU, KVCache, placed
from paceline.execution.sequence import SequenceState
from paceline.models.eagle3 import Eagle3
from paceline.models.llama import Llama

DraftModel = Llama | Eagle3
"""What drafters run: a smaller model of the same vocabulary, or a head upon the target's hidden states."""


@dataclass(frozen=True, slots=True)
class Verified:
    """A step whose tokens are chosen, as a drafter sees it; everything by index of the row in the plan.

    ``states`` hold the sampled tokens already. ``failed``: rows whose KV is not to be trusted. ``tapped``: states of
    the layers in `Drafter.taps`, each [tokens, hidden_size] of the target, where the tokens of row i begin at
    ``firsts[i]``. ``agreement``: what the group does in this step, None for a rank that shares no collectives.
    """

    rows: Sequence[Row]
    states: Sequence[SequenceState]
    sampled: Sequence[tuple[int, ...]]
    failed: Collection[int] = ()
    firsts: Sequence[int] = ()
    tapped: Sequence[Tensor] = ()
    agreement: Agreement | None = None


class Drafter(Protocol):
    """Proposes what comes next.

    ``taps``: layers of the target before which it wants the hidden states (see `paceline.models.llama.Taps`).
    ``caches``: KV of its own, over the target's block tables: moved, filled and cleared like the target's.
    """

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def caches(self) -> Sequence[KVCache]: ...

    def draft(self, step: Verified) -> list[tuple[int, ...]]:
        """At most K drafts for each row that sampled, none at or past position ``max_model_len``."""
        ...

    def idle(self, agreement: Agreement) -> None:
        """Take part in the passes of a step in which this rank has no rows: in their collectives, without a token."""
        ...


def room(state: SequenceState, first: int, block_size: int, K: int, max_model_len: int) -> int:
    """How many drafts there is room for in the sequence, and in the blocks that it has now.

    ``first``: the position whose pass yields the first draft; each further draft needs the slot behind.
    """
    slots = len(state.table) * block_size - first
    return max(0, min(K, max_model_len - len(state.tokens), slots))


@dataclass(frozen=True, slots=True)
class PassBatch:
    """Rows of one pass in the order in which their tokens stand in the batch.

    ``indices``: each row's place in the plan. ``lasts``: where each row's last token is.
    """

    indices: list[int]
    spans: list[RowSpan]
    lasts: list[int]
    positions: Tensor

    @staticmethod
    def of(spans: Mapping[int, RowSpan], device: torch.device = CPU) -> PassBatch:
        """Rows by index in the plan, at least one; positions on ``device``."""
        indices = list(spans)
        ordered = [indices[j] for j in batch_order(list(spans.values()))]
        rows = [spans[i] for i in ordered]
        lasts = np.cumsum([span.n for span in rows]) - 1
        positions = np.concatenate([np.arange(span.start, span.start + span.n) for span in rows])
        return PassBatch(ordered, rows, lasts.tolist(), placed(positions, device))


def passes_of(agreement: Agreement | None, needed: int) -> int:
    """Forward passes of a step: as many as the group has agreed on; alone, as many as are ``needed``."""
    return needed if agreement is None else agreement.draft_passes


def begin_pass(model: DraftModel, rows: bool, mode: int = NONE, size: int = 0) -> bool:
    """Prepare a pass of ``model``; whether it has anything to do: rows of its own, or experts shared with other ranks.

    ``mode``, ``size``: how tokens are exchanged, the same on all ranks; NONE takes any number of tokens from each.
    """
    if model.exchange is not None:
        model.exchange.begin(mode, size)
    return rows or model.exchange is not None


def nothing(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of a pass without tokens (see `paceline.models.llama.Attend`)."""
    return q.new_empty(0, q.shape[1] * q.shape[2])
