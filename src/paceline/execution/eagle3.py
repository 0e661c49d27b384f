# SPDX-License-Identifier: Apache-2.0
"""Drafting by an EAGLE-3 head, which continues each sequence greedily from the target's hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.core.config import EngineConfig, require
from paceline.core.graphs import FULL, NONE
from paceline.core.lockstep import Agreement
from paceline.execution.attention import PagedAttention, RowSpan
from paceline.execution.drafter import PassBatch, Verified, begin_pass, nothing, passes_of, room
from paceline.execution.kvcache import KVCache, placed
from paceline.execution.sequence import SequenceState
from paceline.models.eagle3 import Eagle3
from paceline.models.spec import LlamaConfig
from paceline.models.static_eagle3 import StaticEagle3


class Eagle3Drafter:
    """Keeps the head's KV over the target's block tables, and runs K passes a step.

    What the head computes at a position depends on the token behind it. The first pass computes the positions that
    the target computed in this step, rejected drafts left out: behind the last of them is the token just sampled or,
    at the end of a prompt's chunk, the next of the prompt. So every position of every block is written, and the pass
    ends in the first draft. Each further pass computes one position more (the lookahead slots), with the draft before
    it and the head's own hidden state; the next step writes those positions again.

    The last position of a block that is found by prefix was computed with the token that came next *then*; the
    scheduler therefore drops the last block of a hit, unless it is told not to.
    """

    def __init__(self, model: Eagle3, config: EngineConfig) -> None:
        self.model = model
        self.taps = model.taps
        self.width = config.speculation.width
        self.max_model_len = config.scheduler.max_model_len
        cache = config.cache
        self.cache = KVCache(model.config, cache.num_blocks, cache.block_size, model.dtype, model.device)
        self.caches: Sequence[KVCache] = (self.cache,)
        self._static: StaticEagle3 | None = None
        if self.cache.bits is not None and StaticEagle3.supports(model):
            self._static = StaticEagle3(model, self.cache.bits, self.width, config.scheduler.max_num_seqs)

    def draft(self, step: Verified) -> list[tuple[int, ...]]:
        """See `Drafter.draft`; nothing is computed for rows that failed."""
        states = step.states
        drafts: list[list[int]] = [[] for _ in step.rows]
        wanted = [self._count(s) if tokens else 0 for s, tokens in zip(states, step.sampled, strict=True)]
        spans: dict[int, RowSpan] = {}
        for i, (row, state, tokens) in enumerate(zip(step.rows, states, step.sampled, strict=True)):
            if i not in step.failed:
                end = len(state.tokens) - 1 if tokens else row.start + row.n
                spans[i] = RowSpan(row.start, end - row.start, state.table)
        passes = passes_of(step.agreement, max(wanted, default=0) or bool(spans))
        if self._static is None:
            self._run(step, spans, wanted, drafts, passes)
        else:
            self._run_compiled(self._static, step, spans, wanted, drafts, passes)
        return [tuple(ids) for ids in drafts]

    def idle(self, agreement: Agreement) -> None:
        """See `Drafter.idle`."""
        for done in range(agreement.draft_passes):
            self._begin({}, agreement, done)

    def _count(self, state: SequenceState) -> int:
        first = len(state.tokens) - 2
        return room(state, first, self.cache.block_size, self.width - 1, self.max_model_len)

    def _run(
        self,
        step: Verified,
        spans: Mapping[int, RowSpan],
        wanted: Sequence[int],
        drafts: Sequence[list[int]],
        passes: int,
    ) -> None:
        """All passes, operation by operation; without rows, a share in their collectives."""
        states = step.states
        own: dict[int, Tensor] = {}
        for done in range(passes):
            if done:
                spans = {i: RowSpan(len(states[i].tokens) - 2 + done, 1, states[i].table) for i in own}
            batch = self._begin(spans, step.agreement, done)
            if batch is None:
                continue
            if done:
                ids = torch.tensor([drafts[i][-1] for i in batch.indices], device=self.model.device)
                hidden = torch.stack([own[i] for i in batch.indices])
            else:
                ids, hidden = self._from_target(step, batch)
            attention = PagedAttention(self.cache, batch.spans, self.model.config.num_heads)
            out = self.model.forward(ids, hidden, batch.positions, attention)
            own = self._choose(batch, out, wanted, drafts)

    def _run_compiled(
        self,
        static: StaticEagle3,
        step: Verified,
        spans: Mapping[int, RowSpan],
        wanted: Sequence[int],
        drafts: Sequence[list[int]],
        passes: int,
    ) -> None:
        """The same by the compiled head, which shares no collectives: it has nothing to do without rows."""
        if not spans or not passes:
            return
        indices = list(spans)
        ids = np.concatenate([step.states[i].tokens[s.start + 1 : s.start + s.n + 1] for i, s in spans.items()])
        places = [np.arange(step.firsts[i], step.firsts[i] + span.n) for i, span in spans.items()]
        rows = [(span.start, span.n, span.table) for span in spans.values()]
        static.fuse(step.tapped, np.concatenate(places))
        for done in range(1, passes + 1):
            lasts = np.cumsum([n for _, n, _ in rows]) - 1
            chosen = [j for j, i in enumerate(indices) if wanted[i]]
            indices = [indices[j] for j in chosen]
            for i, token in zip(indices, static.run(ids, rows, lasts[chosen]), strict=True):
                drafts[i].append(token)
            kept = [j for j, i in enumerate(indices) if wanted[i] > done]
            if not kept:
                return
            static.keep(kept)
            indices = [indices[j] for j in kept]
            ids = np.array([drafts[i][-1] for i in indices])
            rows = [(len(step.states[i].tokens) - 2 + done, 1, step.states[i].table) for i in indices]

    def _begin(self, spans: Mapping[int, RowSpan], agreement: Agreement | None, done: int) -> PassBatch | None:
        """Open pass number ``done``; without rows, take part in its collectives, and there is nothing left to do.

        In a FULL step each row of W tokens has at most W positions in the first pass and one in each further.
        """
        mode, size = NONE, 0
        if agreement is not None and agreement.mode == FULL:
            mode, size = FULL, agreement.size // self.width if done else agreement.size
        if not begin_pass(self.model, bool(spans), mode, size):
            return None
        if spans:
            return PassBatch.of(spans, self.model.device)
        none = torch.empty(0, dtype=torch.int64, device=self.model.device)
        state = torch.empty(0, self.model.config.hidden_size, device=self.model.device)
        self.model.forward(none, state, none, nothing)
        return None

    def _from_target(self, step: Verified, batch: PassBatch) -> tuple[Tensor, Tensor]:
        """The tokens behind the positions of ``batch``, and the target's states at these, fused."""
        ids, places = [], []
        for i, span in zip(batch.indices, batch.spans, strict=True):
            ids.append(step.states[i].tokens[span.start + 1 : span.start + span.n + 1])
            places.append(np.arange(step.firsts[i], step.firsts[i] + span.n))
        device = self.model.device
        index = placed(np.concatenate(places), device)
        return placed(np.concatenate(ids), device), self.model.fuse([state[index] for state in step.tapped])

    def _choose(
        self, batch: PassBatch, out: Tensor, wanted: Sequence[int], drafts: Sequence[list[int]]
    ) -> dict[int, Tensor]:
        """Append a draft to each row that wants one; the head's state at the last position of each that wants more."""
        chosen = [(i, last) for i, last in zip(batch.indices, batch.lasts, strict=True) if wanted[i]]
        if not chosen:
            return {}
        states = out[[last for _, last in chosen]]
        for (i, _), token in zip(chosen, self.model.best(states).tolist(), strict=True):
            drafts[i].append(token)
        return {i: state for (i, _), state in zip(chosen, states, strict=True) if len(drafts[i]) < wanted[i]}


def check_eagle3(draft: Eagle3, target: LlamaConfig) -> None:
    """Refuse a head that was made for another target.

    Raises:
        ConfigError: another vocabulary, other hidden states, or layers that ``target`` has not.
    """
    vocabulary, size = draft.config.vocab_size, draft.target_hidden_size
    require(
        vocabulary == target.vocab_size,
        "speculation.model",
        f"its target has a vocabulary of {vocabulary} tokens, the model one of {target.vocab_size}",
    )
    require(
        size == target.hidden_size,
        "speculation.model",
        f"its target has hidden states of {size} numbers, the model of {target.hidden_size}",
    )
    require(
        draft.taps[-1] <= target.num_layers,
        "speculation.model",
        f"it reads hidden states before layers {list(draft.taps)} of its target, and the model has"
        f" {target.num_layers} layers",
    )
