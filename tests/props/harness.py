# SPDX-License-Identifier: Apache-2.0
"""A scheduler beside a shadow executor and a shadow transport, with everything checked after every operation."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from paceline.connectors.decode_bench.scheduler import DecodeBenchScheduler
from paceline.core.config import EngineConfig
from paceline.core.plan import PLACEHOLDER, InvalidResult, Row, StepOutput, StepPlan, StepResult, TransferEvent
from paceline.core.request import Request, State
from paceline.core.scheduler import Scheduler

from .invalid import spoil
from .invariants import Before, check_commit, check_plan, check_state, fingerprint
from .shadow import Cell, ShadowExecutor, Text, require
from .transport import Offer, ScriptedConnector, Transfer, Transport, copied, fill

STOP_TOKEN = 7
"""Ends the requests that were told so."""


class World:
    """One rank under test. ``rng`` decides what the model, the drafter and the network do.

    ``short_drafts``: whether the drafter sits out at times. ``row_errors``: share of rows that are poisoned.
    ``texts``: the true tokens of every request by sequence number. ``ended``: terminal events by request id.
    ``between``: transfer events that are reported after the step in flight and before the next one.
    """

    def __init__(
        self,
        config: EngineConfig,
        connector: ScriptedConnector | DecodeBenchScheduler | None,
        rng: Random,
        *,
        short_drafts: bool = True,
        row_errors: float = 0.01,
    ) -> None:
        self.config = config
        self.rng = rng
        self.K = config.speculation.num_speculative_tokens
        self.short_drafts = short_drafts
        self.row_errors = row_errors
        self.connector = connector
        self.scheduler = Scheduler(config, connector)
        self.executor = ShadowExecutor(config)
        self.transport = Transport(self.executor.kv, rng)
        self.now = 0.0
        self.step = 0
        self.requests: dict[str, Request] = {}
        self.by_seq: dict[int, Request] = {}
        self.texts: dict[int, Text] = {}
        self.got: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.plan: StepPlan | None = None
        self.before: Before | None = None
        self.result: StepResult | None = None
        self.tainted: set[int] = set()
        self.between: list[TransferEvent] = []
        self.fenced_names: set[tuple[int, int]] = set()
        self.unserved: dict[str, int] = {}
        self.known_hashes: dict[int, int] = {}
        self.content_of: dict[bytes, list[int]] = {}

    # -- operations --------------------------------------------------------------------------------------

    def add(self, request: Request, offer: Offer | None = None) -> None:
        self.requests[request.id] = request
        self.got[request.id] = []
        if offer is not None and isinstance(self.connector, ScriptedConnector):
            self.connector.offers[request.id] = offer
        self.scheduler.add(request)
        self.by_seq[request.seq] = request
        self.texts[request.seq] = Text(request.tokens(0, request.num_tokens))
        self.check()

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        self._after()

    def preempt(self, request_id: str) -> None:
        self.scheduler.preempt(request_id)
        self._after()

    def preemptible(self) -> list[str]:
        return [r.id for r in self.scheduler.running if not r.fences]

    def fence(self, request: Request, steps: int) -> None:
        """A transfer reads what is computed of a running request; one at a time has a name of its own."""
        self.fenced_names.add((request.seq, request.generation))
        self.scheduler.fence(request.id)
        read = Transfer(request, copied(request.tables), 0, request.computed, False, self.step + steps)
        self.transport.begin(read)
        self.check()

    def fenceable(self) -> list[Request]:
        running = self.scheduler.running
        return [r for r in running if (r.seq, r.generation) not in self.fenced_names and r.computed]

    def begin(self) -> StepPlan:
        """Plan a step, and run it: its result waits for `commit`."""
        s = self.scheduler
        self.step += 1
        self.now += 1.0
        if isinstance(self.connector, ScriptedConnector):
            self.connector.step = self.step
        self.before = before = Before(s)
        self.plan = plan = s.plan(self.now)
        for block in before.stale(s):
            self.executor.kv.erase(block)
        check_plan(self, plan, before)
        self.executor.apply(plan)
        self._run(plan)
        self.check()
        return plan

    def commit(self, *, invalid_first: bool = False) -> list[StepOutput]:
        """Commit the step in flight, if asked to after a result that must be refused."""
        s, plan, result, before = self.scheduler, self.plan, self.result, self.before
        assert plan is not None
        assert result is not None
        assert before is not None
        if invalid_first:
            self.refuse_invalid(plan, result)
        seen = before.at_commit(s)
        outputs = s.commit(result, self.now)
        self.plan = self.result = None
        self._take(outputs)
        for seq, text in self.texts.items():
            request = self.by_seq[seq]
            if request.num_tokens > len(text):
                text.extend(request.tokens(len(text), request.num_tokens))
        check_commit(self, plan, result, self.tainted, seen)
        self._after()
        if self.between:
            self._take(s.end_transfers(self.between))
            self.between = []
            self._after()
        return outputs

    def refuse_invalid(self, plan: StepPlan, result: StepResult) -> None:
        """A broken executor: nothing of its result may be committed."""
        spoilt = spoil(plan, result, self.K, self.rng)
        was = fingerprint(self.scheduler)
        try:
            self.scheduler.commit(spoilt, self.now)
        except InvalidResult:
            pass
        else:
            require(False, f"committed {spoilt} for {plan}")
        require(fingerprint(self.scheduler) == was, f"{spoilt} was refused and yet left a trace")

    def is_later(self, request: Request) -> bool:
        """Whether the connector would answer "later"."""
        return self._answer(request)[0] is None

    def offers_load(self, request: Request) -> bool:
        """Whether the connector would load asynchronously."""
        return self._answer(request)[1]

    def _answer(self, request: Request) -> tuple[int | None, bool]:
        if not isinstance(self.connector, ScriptedConnector) or request.tables or not request.ask:
            return 0, False
        local = self.scheduler.kv.lookup(request).tokens
        if self.scheduler.drops_last_hit and local:
            local -= self.config.cache.block_size
        return self.connector.get_num_new_matched_tokens(request, local)

    def take_pending(self) -> None:
        self._take(self.scheduler.take_pending())
        self.check()

    # -- what the machine does ---------------------------------------------------------------------------

    def _run(self, plan: StepPlan) -> None:
        """Loads, rows, samples: the result of the step."""
        events: list[TransferEvent] = []
        errors: dict[int, str] = {}
        failed_loads: dict[int, tuple[int, ...]] = {}
        lost: set[Cell] = set()
        index = {row.seq: i for i, row in enumerate(plan.rows)}
        if isinstance(self.connector, DecodeBenchScheduler) and plan.load_meta:
            texts = {seq: Text(text.ids[: self.by_seq[seq].num_tokens]) for seq, text in self.texts.items()}
            fill(self.executor.kv, plan.load_meta, texts, self.executor.tables)
        elif plan.load_meta:
            for load in plan.load_meta:
                if load.is_async:
                    self.transport.begin(load)
                    continue
                event, missing = self.transport.load_now(load)
                if event is not None:
                    lost |= missing
                    i = index[load.request.seq]
                    failed = self._tell(plan, i, event, events)
                    failed_loads |= failed
                    errors |= dict.fromkeys((i, *failed), "load failed")
        for i in range(len(plan.rows)):
            if self.rng.random() < self.row_errors:
                errors.setdefault(i, "not finite")
        writing = self.transport.writing()
        accepted = [self._accepted(row) for row in plan.rows]
        self.tainted = self.executor.run(plan, accepted, errors.keys(), lost, writing.__contains__)
        ended = self.transport.events(self.step)
        self.between = ended if self.rng.random() < 0.2 else []
        events += [] if self.between else ended
        if self.rng.random() < 0.1 and (event := self.transport.noise()) is not None:
            events.insert(self.rng.randint(0, len(events)), event)
        sampled = [
            self._sample(row, accepted[i]) if row.samples and i not in errors else () for i, row in enumerate(plan.rows)
        ]
        drafts = [self._draft(row) for row in plan.rows]
        self.result = StepResult(
            plan.step, sampled, drafts, errors=errors or None, failed_loads=failed_loads or None, transfers=events
        )

    def _tell(
        self, plan: StepPlan, i: int, event: TransferEvent, events: list[TransferEvent]
    ) -> dict[int, tuple[int, ...]]:
        """One of the ways to tell that the synchronous load of row ``i`` failed; returns the failed loads by row.

        As the end of its transfer, with the row's error, both, or so that all rows which join are suspected.
        """
        how = self.rng.choice(("event", "row", "both", "all"))
        if how in ("event", "both"):
            events.append(event)
        if how == "event":
            return {}
        if how != "all":
            return {i: event.failed_blocks}
        joined = {update.seq for update in plan.blocks if update.replace}
        return dict.fromkeys([j for j, row in enumerate(plan.rows) if row.start and row.seq in joined], ())

    def _accepted(self, row: Row) -> int:
        """How many of the row's drafts are accepted; a placeholder never is."""
        real = len(row.drafts) - row.drafts.count(PLACEHOLDER)
        return self.rng.choice((0, real, self.rng.randint(0, real)))

    def _sample(self, row: Row, accepted: int) -> tuple[int, ...]:
        """The accepted drafts and a token; the executor takes note of them."""
        draw = self.rng.random()
        token = STOP_TOKEN if draw < 0.02 else int(draw < 0.15)
        tokens = (*row.drafts[:accepted], token)
        self.executor.texts[row.seq].extend(tokens)
        return tokens

    def _draft(self, row: Row) -> tuple[int, ...]:
        if not row.samples or not self.K:
            return ()
        count = self.rng.randint(0, self.K) if self.short_drafts and self.rng.random() < 0.4 else self.K
        return tuple(int(self.rng.random() < 0.1) for _ in range(count))

    # -- bookkeeping -------------------------------------------------------------------------------------

    def _take(self, outputs: Sequence[StepOutput]) -> None:
        for output in outputs:
            name = output.request_id
            require(name not in self.ended, f"{name}: {output} after its end")
            self.got[name] += output.token_ids
            if output.finish_reason is not None:
                self.ended[name] = output.finish_reason
                request = self.requests[name]
                require(request.state is State.FINISHED, f"{name}: {output}, state {request.state}")
                output_ids = request.output.tolist()
                require(self.got[name] == output_ids, f"{name}: handed out {self.got[name]} of {output_ids}")

    def _after(self) -> None:
        """Reads of finished requests begin at once."""
        if isinstance(self.connector, ScriptedConnector):
            for read in self.connector.reads:
                self.transport.begin(read)
            self.connector.reads.clear()
        self.check()

    def check(self) -> None:
        check_state(self)
