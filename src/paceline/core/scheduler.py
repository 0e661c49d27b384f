# SPDX-License-Identifier: Apache-2.0
"""The scheduler of one rank: every step hands out tokens until targets or budgets are met.

A step has two halves. `Scheduler.plan` decides (running requests first, then the waiting scan) and advances
``computed``; `Scheduler.commit` checks the executor's result as a whole and applies it. Time comes in as an
argument, in seconds.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

import msgspec

from paceline.core import departures as d
from paceline.core.admission import scan_waiting
from paceline.core.commit import (
    commit_errors,
    commit_rows,
    validate_result,
)
from paceline.core.config import EngineConfig
from paceline.core.connector import SchedulerConnector
from paceline.core.kv.manager import KVManager
from paceline.core.kv.pool import BlockPool
from paceline.core.passes import Pass
from paceline.core.plan import NewSequence, StepOutput, StepPlan, StepResult, TransferEvent, validate_transfers
from paceline.core.queue import RequestQueue, rank_key
from paceline.core.request import FinishReason, Request, State
from paceline.core.running import serve_all
from paceline.core.stats import SchedulerStats
from paceline.core.transfers import Transfers, apply_event, end_load, give_up_overdue, hold_blocks


class RequestRefused(ValueError):
    """A request that can never run here; the message names the field."""


class Scheduler:
    """Decides which requests compute how many tokens in each step, and commits what came of it.

    ``running`` is in admission order. ``waiting`` is the queue of requests without blocks. ``holding`` are the
    waiting ones that hold blocks (a load under way or arrived), in start order.
    """

    def __init__(self, config: EngineConfig, connector: SchedulerConnector | None = None) -> None:
        self.config = config
        self.connector = connector
        c, spec = config.scheduler, config.speculation
        self.max_num_seqs = c.max_num_seqs
        self.max_num_batched_tokens = c.max_num_batched_tokens
        self.max_model_len = c.max_model_len
        self.by_priority = c.policy == "priority"
        self._threshold = c.long_prefill_token_threshold
        self.later_deadline_s = c.later_deadline_s
        self.transfer_deadline_s = c.transfer_deadline_s
        self.load_failure_policy = c.load_failure_policy
        self.K = spec.num_speculative_tokens
        self.width = spec.width
        self.lookahead = spec.lookahead_tokens
        self.slots_per_row = spec.slots_per_row
        self.pad_resumed = spec.pad_resumed
        self.graphs_on = config.graphs.mode != "NONE"
        self.drops_last_hit = spec.method in ("eagle3", "mtp") and not spec.disable_eagle_block_drop
        self.refills = bool(getattr(connector, "refills_after_preemption", False))
        self.kv = KVManager(config.cache, c.max_model_len, self.width, self.lookahead)
        self.running: list[Request] = []
        self.waiting = RequestQueue(c.policy)
        self.holding: list[Request] = []
        self.partial: dict[Request, None] = {}
        self.requests: dict[str, Request] = {}
        self.by_seq: dict[int, Request] = {}
        self.transfers = Transfers()
        self.stats = SchedulerStats(self.K)
        self.step = 0
        self.now = 0.0
        self._next_seq = 0
        self._introduced: set[int] = set()
        self._retired: list[int] = []
        self._sent_back: list[int] = []
        self.unserved: list[Request] = []
        self._pass = Pass()
        self._in_flight: StepPlan | None = None
        self._late_aborts: list[str] = []
        self._pending: list[StepOutput] = []

    # -- what others ask ---------------------------------------------------------------------------------

    @property
    def pool(self) -> BlockPool:
        """The block pool (``num_free``, ``num_usable``)."""
        return self.kv.pool

    @property
    def departures(self) -> dict[str, int]:
        """How often each deliberate departure from vLLM 0.32 changed a decision."""
        return self.stats.departures

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.holding)

    @property
    def kv_usage(self) -> float:
        """Share of the usable blocks that are owned, 0 to 1."""
        usable = self.kv.pool.num_usable
        return 1.0 - self.kv.pool.num_free / usable

    @property
    def num_quarantined_blocks(self) -> int:
        """Distinct blocks that stay out of use until the transport of a transfer that was given up confirms."""
        return self.transfers.num_quarantined_blocks

    @property
    def has_work(self) -> bool:
        """Unfinished requests, transfers not reported, news for the executor, outputs not handed out, or a step."""
        return bool(
            self.requests or self.transfers.held or self._retired or self._pending or self._in_flight is not None
        )

    def depart(self, name: str) -> None:
        """Count a decision that vLLM 0.32 would have taken otherwise."""
        self.stats.departures[name] += 1

    # -- requests come and go ----------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestRefused: an empty prompt, one of max_model_len tokens or more, or an id in use.
        """
        if request.num_prompt < 1:
            raise RequestRefused(f"prompt: request {request.id} has no tokens")
        if request.num_prompt >= self.max_model_len:
            raise RequestRefused(
                f"prompt: {request.num_prompt} tokens leave no room for output within"
                f" max_model_len = {self.max_model_len}"
            )
        if request.id in self.requests:
            raise RequestRefused(f"request_id: {request.id} is in use")
        request.seq = self._next_seq
        self._next_seq += 1
        request.max_total = min(request.max_total, self.max_model_len)
        self.requests[request.id] = request
        self.by_seq[request.seq] = request
        self.waiting.add(request)
        self.transfers.recheck = bool(self.transfers.quarantined)

    def abort(self, request_id: str) -> None:
        """End a request; its terminal output comes from the next `commit` or `take_pending`. Unknown ids are old news.

        While a step is in flight the abort waits for its commit: the plan of that step does not change any more.
        """
        if self._in_flight is not None:
            self._late_aborts.append(request_id)
            return
        request = self.requests.get(request_id)
        if request is not None:
            if request.state is State.RUNNING:
                self.running.remove(request)
            self.finish(request, FinishReason.ABORT, self._pending)

    def take_pending(self) -> list[StepOutput]:
        """Terminal outputs that arose outside a commit."""
        pending, self._pending = self._pending, []
        return pending

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        outputs: list[StepOutput],
        *,
        tokens: tuple[int, ...] = (),
        stop_reason: int | None = None,
        error: str | None = None,
    ) -> None:
        """The one terminal event of a request; its blocks return unless a transfer still uses them.

        The caller takes a running request out of ``running``.
        """
        loading = request.loading is not None and request.loading.arrived is None
        if request.state is not State.RUNNING:
            if request in self.holding:
                self.holding.remove(request)
            elif request in self.waiting:
                self.waiting.remove(request)
        request.state = State.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        delay_free, kv_transfer_params = False, None
        if self.connector is not None:
            delay_free, kv_transfer_params = self.connector.request_finished(request, request.tables)
        del self.requests[request.id]
        del self.by_seq[request.seq]
        self.partial.pop(request, None)
        if request.seq in self._introduced:
            self._introduced.remove(request.seq)
            self._retired.append(request.seq)
        if loading or delay_free or request.fences:
            hold_blocks(self, request, loads=loading, saves=request.fences + delay_free)
        else:
            self.kv.release(request)
        outputs.append(
            StepOutput(request.id, tokens, reason.value, stop_reason, error, kv_transfer_params=kv_transfer_params)
        )

    def preempt(self, request_id: str) -> None:
        """Send a running request back to the queue, between steps (operators and tests)."""
        request = self.requests.get(request_id)
        if request is None:
            raise ValueError(f"request_id: {request_id} is unknown")
        if self._in_flight is not None or request.state is not State.RUNNING or request.fences:
            raise ValueError(f"request_id: {request_id} cannot be preempted now ({request.state.value})")
        self.send_back(request)

    def send_back(self, request: Request) -> None:
        """Take all blocks from a running request, forget what was computed, and queue it again.

        Blocks that a transfer still reads stay held until it ends.
        """
        self.running.remove(request)
        if request.fences:
            hold_blocks(self, request, saves=request.fences)
        else:
            self.kv.release(request)
        request.computed = 0
        request.drafts = ()
        request.generation += 1
        request.num_preemptions += 1
        request.loading = None
        request.state = State.PREEMPTED
        self.partial.pop(request, None)
        self.transfers.recheck = bool(self.transfers.quarantined)
        self.stats.preemptions += 1
        self._sent_back.append(request.seq)
        self.waiting.put_back(request)

    def hold(self, request: Request) -> None:
        """Queue a request among those that hold blocks."""
        if self.by_priority:
            insort(self.holding, request, key=rank_key)
        else:
            self.holding.append(request)

    def end_load(self, request: Request) -> bool:
        """Promote a request whose load has ended; False while it is under way."""
        return end_load(self, request)

    def fits_alone(self, request: Request) -> bool:
        """Whether the pool, less what is quarantined, can hold the whole request."""
        tokens = min(request.max_total + self.width + self.lookahead, self.max_model_len)
        usable = self.kv.pool.num_usable - self.transfers.num_quarantined_blocks
        return self.kv.blocks_for(tokens) * len(self.kv.groups) <= usable

    def count_hit(self, request: Request, local: int, external: int) -> None:
        """Prefix cache statistics, in tokens, counted at admission."""
        self.stats.prefix_queries += request.num_tokens
        self.stats.prefix_hits += local
        self.stats.external_hits += external

    def fence(self, request_id: str) -> None:
        """A transfer reads this running request's blocks from now on; its ``saved`` event lifts the fence."""
        request = self.requests.get(request_id)
        if request is None or request.state is not State.RUNNING:
            raise ValueError(f"request_id: {request_id} is not running, so there is nothing to read")
        request.fences += 1
        request.fence_deadline = self.now + self.transfer_deadline_s

    # -- planning ----------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan:
        """Decide the next step. ``computed`` of the planned requests advances here and now."""
        if self._in_flight is not None:
            raise RuntimeError(f"step {self.step - 1} has not been committed")
        self.now = now
        if self.holding or self.transfers.held or self.transfers.recheck:
            give_up_overdue(self, now, self._pending)
        p = self._pass
        p.begin(
            now, self.max_num_batched_tokens, self.slots_per_row, self._prefill_threshold() if self._threshold else 0
        )
        if self.running:
            serve_all(self, p)
        if not p.unserved and not p.preempted and (self.waiting or self.holding):
            scan_waiting(self, p, len(p.rows))
        self.unserved = p.unserved
        if self.partial:
            for request in list(self.partial):
                if request.state is State.RUNNING and request.computed >= request.num_tokens:
                    del self.partial[request]
        return self._close(p)

    def _prefill_threshold(self) -> int:
        """The long-prefill threshold is off while there is nobody whom a long prefill could starve."""
        threshold = self._threshold
        if len(self.running) + self.num_waiting > 1:
            if self.K and threshold < self.width:
                self.depart(d.PREFILL_THRESHOLD)
            return threshold
        return 0

    def hash_planned(self, p: Pass, request: Request) -> None:
        """Full blocks are hashed when planned: others may hit them in this very pass."""
        tokens = min(request.computed, request.num_tokens)
        if tokens >= request.hash_at:
            p.hashed.append((request, request.hashed))
            self.kv.hash_planned(request, tokens)

    def introduce(self, p: Pass, request: Request) -> None:
        """Tell the executor about a sequence before its first row."""
        if request.seq not in self._introduced:
            self._introduced.add(request.seq)
            p.first.append(NewSequence(request.seq, request.id, request.source, request.params, request.stop_ids))
            self.stats.prompt_tokens += request.num_prompt

    def _close(self, p: Pass) -> StepPlan:
        """Freeze the pass into a plan, with its width and, if it is not uniform W, the reasons."""
        rows, stats = p.rows, self.stats
        width = 0
        misses: Sequence[str] = ()
        if rows:
            stats.busy_steps += 1
            width = p.width(self.width) if p.reasons or p.prefill_rows else self.width
            if width == self.width:
                stats.uniform_steps += 1
            else:
                misses = p.misses()
                for reason in misses:
                    stats.misses[reason] += 1
        retired: Sequence[int] = ()
        if self._retired:
            retired, self._retired = self._retired, []
        tokens = self.max_num_batched_tokens - p.budget - self.slots_per_row * len(rows)
        preempted: Sequence[int] = ()
        if self._sent_back:
            preempted, self._sent_back = self._sent_back, []
        first, updates = p.first or (), p.updates or ()
        plan = StepPlan(self.step, rows, tokens, width, first, updates, retired, None, misses, preempted)
        if self.connector is not None:
            meta = self.connector.build_connector_meta(plan)
            if meta is not None:
                plan = msgspec.structs.replace(plan, load_meta=meta)
        self.step += 1
        self._in_flight = plan
        return plan

    # -- committing --------------------------------------------------------------------------------------

    def commit(self, result: StepResult, now: float) -> list[StepOutput]:
        """Apply the result of the step in flight; returns what each request gained.

        Raises:
            InvalidResult: the executor broke its contract. Nothing is committed; the step stays in flight.
        """
        if self._in_flight is None:
            raise RuntimeError("no step is in flight")
        self.now = now
        p, plan = self._pass, self._in_flight
        validate_result(plan, result, self.K)
        self._in_flight = None
        if self.kv.has_recurrent:
            self.kv.end_pass()
        outputs, self._pending = self._pending, []
        transfers = result.transfers
        if p.rows:
            self.stats.generated_tokens += sum(map(len, result.sampled))
            if result.errors:
                transfers = commit_errors(self, p, result, outputs)
            commit_rows(self, p, result, outputs)
        for event in transfers:
            apply_event(self, event, outputs)
        if self._late_aborts:
            self._apply_late_aborts(outputs)
        return outputs

    def end_transfers(self, events: Sequence[TransferEvent]) -> list[StepOutput]:
        """Ends of transfers that are reported while no step is in flight, to an idle rank too.

        Raises:
            InvalidResult: an event that is none. None of them is applied.
        """
        validate_transfers(events)
        outputs = self.take_pending()
        for event in events:
            apply_event(self, event, outputs)
        return outputs

    def _apply_late_aborts(self, outputs: list[StepOutput]) -> None:
        aborts, self._late_aborts = self._late_aborts, []
        for request_id in aborts:
            self.abort(request_id)
        outputs += self.take_pending()
