# SPDX-License-Identifier: Apache-2.0
"""Drafting by a smaller model of the same vocabulary, which continues each sequence greedily."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.core.config import EngineConfig, require
from paceline.core.lockstep import Agreement
from paceline.execution.attention import PagedAttention, RowSpan
from paceline.execution.drafter import PassBatch, Verified, begin_pass, nothing, passes_of, room
from paceline.execution.kvcache import Array, KVCache, placed
from paceline.execution.sequence import SequenceState
from paceline.models.llama import Llama
from paceline.models.spec import LlamaConfig


class ModelDrafter:
    """Keeps a KV cache of its own over the target's block tables, and runs K passes a step.

    The first pass computes what the target computed in this step, rejected drafts left out and the token just sampled
    added (the row's draft slot); each further pass computes the draft before it (the lookahead slots). Whatever
    blocks the target may read, found by prefix or shared within a step, therefore hold the drafter's KV too.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, model: Llama, config: EngineConfig) -> None:
        self.model = model
        self.num_speculative_tokens = config.speculation.num_speculative_tokens
        self.max_model_len = config.scheduler.max_model_len
        cache = config.cache
        self.cache = KVCache(model.config, cache.num_blocks, cache.block_size, model.dtype, model.device)
        self.caches: Sequence[KVCache] = (self.cache,)

    def draft(self, step: Verified) -> list[tuple[int, ...]]:
        """See `Drafter.draft`; nothing is computed for rows that failed."""
        drafts: list[list[int]] = [[] for _ in step.rows]
        states = step.states
        wanted = [self._count(s) if tokens else 0 for s, tokens in zip(states, step.sampled, strict=True)]
        spans: dict[int, RowSpan] = {}
        for i, (row, state, tokens, count) in enumerate(zip(step.rows, states, step.sampled, wanted, strict=True)):
            if i not in step.failed:
                # The sequence ends with the sampled token, which is computed only if it is followed by drafts.
                end = len(state.tokens) - (not count) if tokens else row.start + row.n
                if end > row.start:
                    spans[i] = RowSpan(row.start, end - row.start, state.table)
        passes = passes_of(step.agreement, max(wanted, default=0) or bool(spans))
        for done in range(passes):
            if done:
                spans = {
                    i: RowSpan(len(states[i].tokens) - 1 + done, 1, states[i].table) for i in spans if wanted[i] > done
                }
                tokens_of: dict[int, Array] = {i: np.array(drafts[i][-1:], dtype=np.int64) for i in spans}
            else:
                tokens_of = {i: states[i].tokens[s.start : s.start + s.n] for i, s in spans.items()}
            self._pass(spans, tokens_of, wanted, drafts)
        return [tuple(ids) for ids in drafts]

    def idle(self, agreement: Agreement) -> None:
        """See `Drafter.idle`."""
        for _ in range(agreement.draft_passes):
            self._pass({}, {}, (), [])

    def _count(self, state: SequenceState) -> int:
        first = len(state.tokens) - 1
        return room(state, first, self.cache.block_size, self.num_speculative_tokens, self.max_model_len)

    def _pass(
        self,
        spans: Mapping[int, RowSpan],
        tokens: Mapping[int, Array],
        wanted: Sequence[int],
        drafts: Sequence[list[int]],
    ) -> None:
        """Compute the rows ``spans`` (by index in the plan) and append one draft to each that wants one."""
        if not begin_pass(self.model, bool(spans)):
            return
        if not spans:
            none = torch.empty(0, dtype=torch.int64, device=self.model.device)
            self.model.forward(none, none, nothing)
            return
        batch = PassBatch.of(spans, self.model.device)
        ids = placed(np.concatenate([tokens[i] for i in batch.indices]), self.model.device)
        attention = PagedAttention(self.cache, batch.spans, self.model.config.num_heads)
        hidden = self.model.forward(ids, batch.positions, attention)
        drafting = [(i, last) for i, last in zip(batch.indices, batch.lasts, strict=True) if wanted[i]]
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
