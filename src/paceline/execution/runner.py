# SPDX-License-Identifier: Apache-2.0
"""The executor of one rank: runs step plans on a model, eagerly, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from paceline.core.config import EngineConfig, require
from paceline.core.lockstep import Agreement
from paceline.core.plan import Row, StepPlan, StepResult, TokenLogprobs
from paceline.core.verifier import conditional_rates
from paceline.execution.attention import PagedAttention, RowSpan, batch_order
from paceline.execution.draft_model import ModelDrafter, check_draft_model
from paceline.execution.kvcache import KVCache
from paceline.execution.logprobs import Scoring, score
from paceline.execution.ngram import NgramDrafter
from paceline.execution.rejection import Verification, verify
from paceline.execution.sequence import PlanMismatch, SequenceState, adjusted
from paceline.models.llama import Llama


@dataclass(slots=True)
class _Batch:
    """Rows of a step in the order in which their tokens stand in the batch.

    ``indices``: each row's place in the plan. ``firsts``: where each row's tokens begin in the batch.
    """

    indices: list[int]
    rows: list[Row]
    states: list[SequenceState]
    spans: list[RowSpan]
    firsts: list[int]
    tokens: Tensor
    positions: Tensor


class ModelExecutor:
    """Computes step plans: ``launch`` runs a step, ``collect`` hands out its result.

    It keeps the KV cache, and per sequence the tokens and the block table; the scheduler owns every decision.
    """

    def __init__(self, model: Llama, config: EngineConfig, *, seed: int = 0, draft: Llama | None = None) -> None:
        """``seed`` makes the random numbers of requests without one of their own repeatable.

        ``draft``: the model that speculation method ``draft_model`` drafts with.

        Raises:
            ConfigError: the configuration asks for what this executor cannot do.
        """
        _refuse_unsupported(config, model)
        self.model = model
        self.config = config
        self.seed = seed
        cache = config.cache
        self.cache = KVCache(model.config, cache.num_blocks, cache.block_size, model.dtype)
        self._drafter = _drafter(config, model, draft)
        synthetic = config.speculation.rejection_sample_method == "synthetic"
        self._synthetic = conditional_rates(config.speculation) if synthetic else None
        self._sequences: dict[int, SequenceState] = {}
        self._result: StepResult | None = None

    def launch(self, plan: StepPlan, agreement: Agreement | None = None) -> None:
        """Run a step. There are no peers to meet and no graphs to replay, so ``agreement`` changes nothing.

        Raises:
            PlanMismatch: the plan contradicts earlier ones; nothing can be trusted after that.
        """
        if self._result is not None:
            raise PlanMismatch(f"step {plan.step} is launched while the result of {self._result.step} is uncollected")
        if plan.load_meta is not None:
            raise PlanMismatch("the plan carries connector metadata, and this executor has no connector")
        self._apply(plan)
        with torch.inference_mode():
            self._result = self._run(plan)

    def collect(self) -> StepResult:
        """The result of the step launched last, once."""
        result, self._result = self._result, None
        if result is None:
            raise PlanMismatch("no step was launched")
        return result

    def _apply(self, plan: StepPlan) -> None:
        for new in plan.first:
            self._sequences[new.seq] = SequenceState(new, self.seed)
        for update in plan.blocks:
            self._state(update.seq).update_blocks(update)
        for seq in plan.retired:
            # A request may end before it was ever scheduled, and so before it was named here.
            self._sequences.pop(seq, None)

    def _state(self, seq: int) -> SequenceState:
        state = self._sequences.get(seq)
        if state is None:
            raise PlanMismatch(f"sequence {seq} is unknown")
        return state

    def _run(self, plan: StepPlan) -> StepResult:
        if not plan.rows:
            return StepResult(plan.step, ())
        began = perf_counter()
        batch = self._batch(plan.rows)
        attention = PagedAttention(self.cache, batch.spans, self.model.config.num_heads)
        hidden = self.model.forward(batch.tokens, batch.positions, attention)
        sampled: list[tuple[int, ...]] = [()] * len(plan.rows)
        errors = self._poisoned(batch, hidden)
        logprobs = self._sample(batch, hidden, sampled, errors)
        forwarded = perf_counter()
        drafts: Sequence[tuple[int, ...]] = ()
        if self._drafter is not None:
            states = [self._sequences[row.seq] for row in plan.rows]
            drafts = self._drafter.draft(plan.rows, states, sampled, errors)
        return StepResult(
            plan.step,
            sampled,
            drafts,
            logprobs,
            errors=errors or None,
            forward_s=forwarded - began,
            draft_s=perf_counter() - forwarded,
        )

    def _batch(self, plan_rows: Sequence[Row]) -> _Batch:
        block_size = self.cache.block_size
        states = [self._state(row.seq) for row in plan_rows]
        spans = [RowSpan(row.start, row.n, state.table) for row, state in zip(plan_rows, states, strict=True)]
        order = batch_order(spans)
        tokens, positions, firsts, first = [], [], [], 0
        for i in order:
            row = plan_rows[i]
            tokens.append(states[i].inputs(row.start, row.n, row.drafts, row.samples, block_size))
            positions.append(np.arange(row.start, row.start + row.n))
            firsts.append(first)
            first += row.n
        return _Batch(
            order,
            [plan_rows[i] for i in order],
            [states[i] for i in order],
            [spans[i] for i in order],
            firsts,
            torch.from_numpy(np.concatenate(tokens)),
            torch.from_numpy(np.concatenate(positions)),
        )

    def _poisoned(self, batch: _Batch, hidden: Tensor) -> dict[int, str]:
        """Rows with a hidden state that is not finite, by index in the plan; what they wrote is cleared.

        Left in the cache it would spread to whoever is given the block next: a masked slot has weight 0, but
        0 times NaN is NaN.
        """
        finite = hidden.sum(-1).isfinite()
        if bool(finite.all()):
            return {}
        errors = {}
        for index, span, first in zip(batch.indices, batch.spans, batch.firsts, strict=True):
            if not bool(finite[first : first + span.n].all()):
                errors[index] = f"a hidden state of positions [{span.start}, {span.start + span.n}) is not finite"
                positions = np.arange(span.start, span.start + span.n)
                blocks = span.table[positions // self.cache.block_size]
                self.cache.clear(self.cache.slot_index(blocks, positions % self.cache.block_size))
        return errors

    def _sample(
        self, batch: _Batch, hidden: Tensor, sampled: list[tuple[int, ...]], errors: dict[int, str]
    ) -> list[tuple[TokenLogprobs, ...] | None] | None:
        """Fill ``sampled`` for the rows that sample and carry no error, and append the tokens to their sequences.

        Returns log-probabilities for each row of the plan that asked; None if nobody did.
        """
        wanted: list[int] = []
        verifications: list[Verification] = []
        owners: list[int] = []
        for i, (index, row, state) in enumerate(zip(batch.indices, batch.rows, batch.states, strict=True)):
            if not row.samples or index in errors:
                continue
            last = batch.firsts[i] + row.n
            verifications.append(state.verification(len(wanted), row.drafts))
            wanted.extend(range(last - len(row.drafts) - 1, last))
            owners.append(i)
        if not owners:
            return None
        states = [batch.states[i] for i in owners]
        raw = self.model.logits(hidden[wanted])
        logits = adjusted(raw, verifications, states)
        top, best = logits.max(-1)
        finite = top.isfinite().tolist()
        chosen = verify(logits, best.tolist(), verifications, self._synthetic)
        for i, v, tokens in zip(owners, verifications, chosen, strict=True):
            index = batch.indices[i]
            if not all(finite[v.first : v.first + len(v.drafts) + 1]):
                errors[index] = "the best logit is not finite"
                continue
            sampled[index] = tokens
            batch.states[i].append(tokens)
        if all(state.num_logprobs is None for state in states):
            return None
        scorings = [
            (batch.indices[i], Scoring(v.first, sampled[batch.indices[i]], state.num_logprobs))
            for i, v, state in zip(owners, verifications, states, strict=True)
            if state.num_logprobs is not None and sampled[batch.indices[i]]
        ]
        logprobs: list[tuple[TokenLogprobs, ...] | None] = [None] * len(sampled)
        for (index, _), scored in zip(scorings, score(raw, [s for _, s in scorings]), strict=True):
            logprobs[index] = scored
        return logprobs


def _drafter(config: EngineConfig, target: Llama, draft: Llama | None) -> NgramDrafter | ModelDrafter | None:
    speculation, max_model_len = config.speculation, config.scheduler.max_model_len
    if speculation.method is None:
        return None
    if speculation.method == "draft_model":
        require(draft is not None, "speculation.model", "method 'draft_model' needs a loaded draft model")
        assert draft is not None
        check_draft_model(draft.config, target.config, max_model_len)
        return ModelDrafter(draft, config)
    lookup = speculation.prompt_lookup_min, speculation.prompt_lookup_max
    return NgramDrafter(*lookup, speculation.num_speculative_tokens, max_model_len)


def _refuse_unsupported(config: EngineConfig, model: Llama) -> None:
    method = config.speculation.method
    known = (None, "ngram", "draft_model")
    require(method in known, "speculation.method", f"{method!r} has no drafter here; use 'ngram' or 'draft_model'")
    require(config.graphs.mode == "NONE", "graphs.mode", "this executor runs every step eagerly; use NONE")
    kinds = [group.kind for group in config.cache.groups]
    require(kinds == ["full"], "cache.groups", f"a Llama model has one group of full attention, not {kinds}")
    limit, asked = model.config.max_position, config.scheduler.max_model_len
    require(asked <= limit, "scheduler.max_model_len", f"the model's context is {limit} tokens, got {asked}")
