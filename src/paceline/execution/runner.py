# SPDX-License-Identifier: Apache-2.0
"""The executor of one rank: runs step plans on a model, where the model is."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import msgspec
import numpy as np
import torch
from torch import Tensor

from paceline.core.config import ConfigError, EngineConfig, require
from paceline.core.connector import WorkerConnector
from paceline.core.graphs import FULL, NONE, GraphDispatcher
from paceline.core.lockstep import RUN, Agreement
from paceline.core.plan import StepPlan, StepResult, TokenLogprobs
from paceline.core.verifier import conditional_rates
from paceline.engine.rank import StepCounts
from paceline.execution.attention import PagedAttention
from paceline.execution.batch import Batch
from paceline.execution.connector import ConnectorSteps
from paceline.execution.cuda_recorder import CudaRecorder
from paceline.execution.decode_graphs import DecodeGraphs, GraphLimits, Recorder, table_lengths
from paceline.execution.draft_model import ModelDrafter, check_draft_model
from paceline.execution.drafter import Drafter, DraftModel, Verified
from paceline.execution.eagle3 import Eagle3Drafter, check_eagle3
from paceline.execution.full import Computed, FullSteps, StaticSteps, Verdict
from paceline.execution.kvcache import KVCache, placed
from paceline.execution.logprobs import Scoring, score
from paceline.execution.ngram import NgramDrafter
from paceline.execution.rejection import Verification, verify
from paceline.execution.sequence import PlanMismatch, SequenceState, adjusted
from paceline.models.eagle3 import Eagle3
from paceline.models.llama import Attend, Llama, Taps
from paceline.models.static import StaticLimits, StaticMixture

NOT_FINITE = "the best logit is not finite"


class ModelExecutor:
    """Computes step plans: ``launch`` runs a step, ``collect`` hands out its result.

    It keeps the KV cache, and per sequence the tokens and the block table; the scheduler owns every decision.
    """

    def __init__(
        self,
        model: Llama,
        config: EngineConfig,
        *,
        seed: int = 0,
        draft: DraftModel | None = None,
        connector: WorkerConnector | None = None,
        record: Recorder | None = None,
    ) -> None:
        """``seed`` makes the random numbers of requests without one of their own repeatable.

        ``draft``: the model that speculation methods ``draft_model`` and ``eagle3`` draft with. ``connector``: moves
        KV in and out of the cache, a drafter's included. ``record``: captures decode graphs; None: CUDA does, where the
        model is on a GPU.

        Raises:
            ConfigError: the configuration asks for what this executor cannot do.
        """
        _refuse_unsupported(config, model)
        self.model = model
        self.config = config
        self.seed = seed
        cache = config.cache
        self.cache = KVCache(model.config, cache.num_blocks, cache.block_size, model.dtype, model.device)
        self._drafter = _drafter(config, model, draft)
        synthetic = config.speculation.rejection_sample_method == "synthetic"
        self._synthetic = conditional_rates(config.speculation) if synthetic else None
        taps = () if self._drafter is None else self._drafter.taps
        self._full = _full(config, model, self.cache, taps, self._synthetic, record)
        self._caches = [self.cache, *(self._drafter.caches if self._drafter is not None else ())]
        self._connector: ConnectorSteps | None = None
        if connector is not None:
            layers = [layer for kept in self._caches for layer in kept.layers]
            self._connector = ConnectorSteps(connector, [layers], cache.block_size)
        self._sequences: dict[int, SequenceState] = {}
        self._result: StepResult | None = None
        self.steps = StepCounts()

    def launch(self, plan: StepPlan, agreement: Agreement | None = None) -> None:
        """Run a step, or the share in it of a rank without rows. ``agreement``: None for a rank on its own.

        What a FULL step fixes is the size in which ranks exchange tokens, and so what each of them waits for. It is
        computed by the backend that the model has for it where there is one, and else by the same operations as any
        other.

        Raises:
            PlanMismatch: the plan contradicts earlier ones; nothing can be trusted after that.
        """
        if self._result is not None:
            raise PlanMismatch(f"step {plan.step} is launched while the result of {self._result.step} is uncollected")
        if plan.load_meta is not None and self._connector is None:
            raise PlanMismatch("the plan carries connector metadata, and this executor has no connector")
        self._apply(plan)
        with torch.inference_mode():
            self._result = self._run(plan, agreement)

    def collect(self) -> StepResult:
        """The result of the step launched last, once, with the transfers that have ended by now."""
        result, self._result = self._result, None
        if result is None:
            raise PlanMismatch("no step was launched")
        if self._connector is not None and (ended := self._connector.finished()):
            for event in ended:
                if event.failed_blocks:
                    self._heal(event.failed_blocks)
            result = msgspec.structs.replace(result, transfers=ended)
        return result

    def shutdown(self) -> None:
        """Release what a connector holds. Nothing is launched any more."""
        if self._connector is not None:
            self._connector.shutdown()

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

    def _run(self, plan: StepPlan, agreement: Agreement | None) -> StepResult:
        load_s = 0.0 if self._connector is None else self._connector.begin(plan)
        if not plan.rows:
            if agreement is not None and agreement.run == RUN:
                self._dummy(agreement)
            return StepResult(plan.step, (), load_s=load_s)
        began = perf_counter()
        self.steps.count(plan.tokens, agreement)
        states = [self._state(row.seq) for row in plan.rows]
        batch = Batch.of(plan.rows, states, self.cache.block_size)
        self._open_exchange(agreement, None)
        taps = Taps(self._drafter.taps) if self._drafter is not None and self._drafter.taps else None
        computed = self._forward(batch, agreement, taps)
        sampled: list[tuple[int, ...]] = [()] * len(plan.rows)
        errors = self._poisoned(batch, computed)
        failed_loads: dict[int, tuple[int, ...]] = {}
        if self._connector is not None:
            # Only now: what went wrong here must not keep other ranks waiting in the forward.
            unloaded, failed_loads = self._connector.failures(plan.rows, states)
            errors |= unloaded
            for i, blocks in failed_loads.items():
                self._heal(blocks or states[i].table.tolist())
        logprobs = self._choose(batch, computed, sampled, errors)
        forwarded = perf_counter()
        drafts: Sequence[tuple[int, ...]] = ()
        if self._drafter is not None:
            drafts = self._drafter.draft(self._verified(plan, batch, states, sampled, errors, taps, agreement))
        return StepResult(
            plan.step,
            sampled,
            drafts,
            logprobs,
            errors=errors or None,
            failed_loads=failed_loads or None,
            load_s=load_s,
            forward_s=forwarded - began,
            draft_s=perf_counter() - forwarded,
        )

    def _forward(self, batch: Batch, agreement: Agreement | None, taps: Taps | None) -> Computed:
        """All tokens, by the backend of FULL steps if this is one and as that was made for."""
        if self._full is not None and agreement is not None and agreement.mode == FULL:
            computed = self._full.forward(batch, agreement.size, taps, self._connector)
            if computed is not None:
                return computed
        attention: Attend = PagedAttention(self.cache, batch.spans, self.model.config.num_heads)
        if self._connector is not None:
            attention = self._connector.attend(attention)
        tokens, positions = (placed(values, self.model.device) for values in (batch.tokens, batch.positions))
        return Computed(self.model.forward(tokens, positions, attention, taps))

    def _open_exchange(self, agreement: Agreement | None, inert: Tensor | None) -> None:
        """Say how the layers of this forward exchange tokens with the experts of other ranks, if they do."""
        if self.model.exchange is not None:
            mode, size = (NONE, 0) if agreement is None else (agreement.mode, agreement.size)
            self.model.exchange.begin(mode, size, inert)

    def _dummy(self, agreement: Agreement) -> None:
        """A step in which only other ranks have rows: experts and drafter serve them, in every collective.

        W inert tokens pass through the model; they read and write no cache and go to no expert. In a FULL step its
        backend sees to that, if there is one.
        """
        self.steps.count(0, agreement)
        if self._full is not None and agreement.mode == FULL:
            self._open_exchange(agreement, None)
            self._full.idle(agreement.size)
        elif self.model.exchange is not None:
            width = self.config.speculation.width
            tokens = torch.zeros(width, dtype=torch.int64, device=self.model.device)
            self._open_exchange(agreement, tokens == 0)
            self.model.forward(tokens, torch.arange(width, device=tokens.device), no_attention)
        if self._drafter is not None:
            self._drafter.idle(agreement)

    def _verified(
        self,
        plan: StepPlan,
        batch: Batch,
        states: Sequence[SequenceState],
        sampled: Sequence[tuple[int, ...]],
        errors: dict[int, str],
        taps: Taps | None,
        agreement: Agreement | None,
    ) -> Verified:
        """The step as its drafter sees it, in the order of the plan."""
        firsts = [0] * len(plan.rows)
        for index, first in zip(batch.indices, batch.firsts, strict=True):
            firsts[index] = first
        return Verified(plan.rows, states, sampled, errors, firsts, taps.states if taps else (), agreement)

    def _poisoned(self, batch: Batch, computed: Computed) -> dict[int, str]:
        """Rows with a hidden state that is not finite, by index in the plan; what they wrote is cleared.

        Left in the cache it would spread to whoever is given the block next: a masked slot has weight 0, but
        0 times NaN is NaN.
        """
        if computed.verdicts is not None and all(verdict.finite for verdict in computed.verdicts):
            return {}
        finite = computed.hidden.sum(-1).isfinite()
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

    def _heal(self, blocks: Sequence[int]) -> None:
        """What a failed load left in ``blocks`` may be anything, and is read, and masked, before it is overwritten."""
        for cache in self._caches:
            cache.heal(blocks)

    def _choose(
        self, batch: Batch, computed: Computed, sampled: list[tuple[int, ...]], errors: dict[int, str]
    ) -> list[tuple[TokenLogprobs, ...] | None] | None:
        """Fill ``sampled`` for the rows that sample and carry no error, and append the tokens to their sequences.

        Returns log-probabilities for each row of the plan that asked; None if nobody did.
        """
        if computed.verdicts is None or not all(state.plain for state in batch.states):
            return self._sample(batch, computed, sampled, errors)
        self._take(batch, computed.verdicts, sampled, errors)
        return None

    def _take(
        self, batch: Batch, verdicts: Sequence[Verdict], sampled: list[tuple[int, ...]], errors: dict[int, str]
    ) -> None:
        """See `_choose`: the rows were verified in the forward."""
        for index, row, state, verdict in zip(batch.indices, batch.rows, batch.states, verdicts, strict=True):
            if index in errors:
                continue
            if not verdict.sound:
                errors[index] = NOT_FINITE
                continue
            sampled[index] = (*row.drafts[: verdict.accepted], verdict.token)
            state.append(sampled[index])

    def _sample(
        self, batch: Batch, computed: Computed, sampled: list[tuple[int, ...]], errors: dict[int, str]
    ) -> list[tuple[TokenLogprobs, ...] | None] | None:
        """See `_choose`: logits are adjusted, sampled from and scored."""
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
        raw = self.model.logits(computed.hidden[wanted]) if computed.logits is None else computed.logits[wanted]
        logits = adjusted(raw, verifications, states)
        top, best = logits.max(-1)
        finite = top.isfinite().tolist()
        chosen = verify(logits, best.tolist(), verifications, self._synthetic)
        for i, v, tokens in zip(owners, verifications, chosen, strict=True):
            index = batch.indices[i]
            if not all(finite[v.first : v.first + len(v.drafts) + 1]):
                errors[index] = NOT_FINITE
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


def no_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of inert tokens (see `paceline.models.llama.Attend`): zeros, whatever they ask for."""
    return q.new_zeros(q.shape[0], q.shape[1] * q.shape[2])


def _drafter(config: EngineConfig, target: Llama, draft: DraftModel | None) -> Drafter | None:
    speculation, max_model_len = config.speculation, config.scheduler.max_model_len
    if speculation.method is None:
        return None
    if speculation.method == "eagle3":
        if not isinstance(draft, Eagle3):
            raise ConfigError("speculation.model", "method 'eagle3' needs a loaded EAGLE-3 model")
        check_eagle3(draft, target.config)
        return Eagle3Drafter(draft, config)
    if speculation.method == "draft_model":
        if not isinstance(draft, Llama):
            raise ConfigError("speculation.model", "method 'draft_model' needs a loaded draft model")
        check_draft_model(draft.config, target.config, max_model_len)
        return ModelDrafter(draft, config)
    lookup = speculation.prompt_lookup_min, speculation.prompt_lookup_max
    return NgramDrafter(*lookup, speculation.num_speculative_tokens, max_model_len)


def _full(
    config: EngineConfig,
    model: Llama,
    cache: KVCache,
    taps: tuple[int, ...],
    rates: Sequence[float] | None,
    record: Recorder | None,
) -> FullSteps | None:
    """The backend of FULL steps, if graphs are on and the model has one. ``rates``: of synthetic verification."""
    if config.graphs.mode != "FULL_DECODE_ONLY":
        return None
    scheduler, width = config.scheduler, config.speculation.width
    lengths = table_lengths(scheduler.max_model_len, width, cache.block_size)
    if record is None and model.device.type == "cuda":
        record = CudaRecorder(model.device)
    if record is not None:
        return DecodeGraphs(
            model, cache, GraphLimits(GraphDispatcher(config).sizes, width, lengths, taps, rates), record
        )
    if cache.bits is None or not StaticMixture.supports(model):
        return None
    return StaticSteps(StaticMixture(model, cache.bits, StaticLimits(width, scheduler.max_num_seqs, lengths[-1], taps)))


def _refuse_unsupported(config: EngineConfig, model: Llama) -> None:
    method = config.speculation.method
    require(method != "mtp", "speculation.method", "'mtp' has no drafter here; use ngram, draft_model or eagle3")
    kinds = [group.kind for group in config.cache.groups]
    require(kinds == ["full"], "cache.groups", f"a Llama model has one group of full attention, not {kinds}")
    limit, asked = model.config.max_position, config.scheduler.max_model_len
    require(asked <= limit, "scheduler.max_model_len", f"the model's context is {limit} tokens, got {asked}")
