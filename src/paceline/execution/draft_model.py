# SPDX-License-Identifier: Apache-2.0
"""Drafting by a smaller model of the same vocabulary, which continues each sequence greedily."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.core.config import EngineConfig, require
from paceline.core.plan import Row
from paceline.execution.attention import PagedAttention, RowSpan, batch_order
from paceline.execution.kvcache import Array, KVCache
from paceline.execution.sequence import SequenceState
from paceline.models.llama import Llama
from paceline.models.spec import LlamaConfig


class ModelDrafter:
    """Keeps a KV cache of its own over the target's block tables, and runs K passes a step.

    The first pass computes what the target computed in this step, rejected drafts left out and the token just sampled
    added (the row's draft slot); each further pass computes the draft before it (the lookahead slots). Whatever
    blocks the target may read, found by prefix or shared within a step, therefore hold the drafter's KV too.
    """

    def __init__(self, model: Llama, config: EngineConfig) -> None:
        self.model = model
        self.num_speculative_tokens = config.speculation.num_speculative_tokens
        self.max_model_len = config.scheduler.max_model_len
        self.cache = KVCache(model.config, config.cache.num_blocks, config.cache.block_size, model.dtype)

    def draft(
        self,
        rows: Sequence[Row],
        states: Sequence[SequenceState],
        sampled: Sequence[tuple[int, ...]],
        failed: Collection[int],
    ) -> list[tuple[int, ...]]:
        """At most K drafts for each row that sampled, none at or past position ``max_model_len``.

        ``failed``: rows whose KV is not to be trusted; nothing is computed for them.
        """
        drafts: list[list[int]] = [[] for _ in rows]
        wanted = [self._count(s) if tokens else 0 for s, tokens in zip(states, sampled, strict=True)]
        spans: dict[int, RowSpan] = {}
        for i, (row, state, tokens, count) in enumerate(zip(rows, states, sampled, wanted, strict=True)):
            if i not in failed:
                # The sequence ends with the sampled token, which is computed only if it is followed by drafts.
                end = len(state.tokens) - (not count) if tokens else row.start + row.n
                if end > row.start:
                    spans[i] = RowSpan(row.start, end - row.start, state.table)
        self._pass(spans, [states[i].tokens[s.start : s.start + s.n] for i, s in spans.items()], wanted, drafts)
        for done in range(1, max(wanted, default=0)):
            spans = {
                i: RowSpan(len(states[i].tokens) - 1 + done, 1, states[i].table) for i in spans if wanted[i] > done
            }
            self._pass(spans, [np.array(drafts[i][-1:], dtype=np.int64) for i in spans], wanted, drafts)
        return [tuple(ids) for ids in drafts]

    def _count(self, state: SequenceState) -> int:
        """How many drafts there is room for, in the sequence and in the blocks that it has now."""
        length = len(state.tokens)
        slots = len(state.table) * self.cache.block_size - (length - 1)
        return max(0, min(self.num_speculative_tokens, self.max_model_len - length, slots))

    def _pass(
        self, spans: dict[int, RowSpan], tokens: Sequence[Array], wanted: Sequence[int], drafts: list[list[int]]
    ) -> None:
        """Compute the rows ``spans`` (by index) and append one draft to each that wants one."""
        if not spans:
            return
        indices = list(spans)
        order = batch_order(list(spans.values()))
        ordered = [spans[indices[j]] for j in order]
        ids = torch.from_numpy(np.concatenate([tokens[j] for j in order]))
        positions = torch.from_numpy(np.concatenate([np.arange(s.start, s.start + s.n) for s in ordered]))
        attention = PagedAttention(self.cache, ordered, self.model.config.num_heads)
        hidden = self.model.forward(ids, positions, attention)
        lasts = np.cumsum([s.n for s in ordered]) - 1
        drafting = [(indices[j], int(last)) for j, last in zip(order, lasts, strict=True) if wanted[indices[j]]]
        if drafting:
            best: Tensor = self.model.logits(hidden[[last for _, last in drafting]]).argmax(-1)
            for (i, _), token in zip(drafting, best.tolist(), strict=True):
                drafts[i].append(token)


def check_draft_model(draft: LlamaConfig, target: LlamaConfig, max_model_len: int) -> None:
    """Refuse a draft model that cannot stand beside ``target``.

    Raises:
        ConfigError: another vocabulary, or a context shorter than ``max_model_len`` tokens.
    """
    require(
        draft.vocab_size == target.vocab_size,
        "speculation.model",
        f"its vocabulary has {draft.vocab_size} tokens, that of the model {target.vocab_size}; they must be the same",
    )
    require(
        draft.max_position >= max_model_len,
        "speculation.model",
        f"its context is {draft.max_position} tokens; lower scheduler.max_model_len = {max_model_len} to that",
    )
