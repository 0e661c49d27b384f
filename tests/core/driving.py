# SPDX-License-Identifier: Apache-2.0
"""Drives a scheduler step by step with scripted answers: the tests of the core need no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.connectors.decode_bench.scheduler import DecodeBenchScheduler
from paceline.core.config import (
    CacheConfig,
    EngineConfig,
    GraphConfig,
    GroupConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from paceline.core.connector import SchedulerConnector
from paceline.core.kv.pool import NULL_BLOCK
from paceline.core.plan import PLACEHOLDER, Row, StepOutput, StepPlan, StepResult, TransferEvent
from paceline.core.request import Request, SamplingParams, State, StoredTokens, TokenSource
from paceline.core.scheduler import Scheduler

DRAFT = 7
"""Every draft that the scripted drafter proposes; what it "accepts" is this too."""
MODEL = 5
"""Every token of the scripted model's own."""
FULL_GROUP = (GroupConfig(),)


def engine_config(
    *,
    K: int = 3,
    block_size: int = 16,
    num_blocks: int = 200,
    seqs: int = 8,
    budget: int = 256,
    mml: int = 512,
    graphs: bool = True,
    pad: Any = "resumed",
    policy: Any = "fcfs",
    caching: bool = True,
    threshold: int = 0,
    method: Any = "ngram",
    lookahead: int | None = None,
    draft_slots: int | None = None,
    groups: tuple[GroupConfig, ...] = FULL_GROUP,
    capture_sizes: tuple[int, ...] | None = None,
    **scheduler: Any,
) -> EngineConfig:
    """A small engine; K = 0 is one without speculation."""
    return EngineConfig(
        scheduler=SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=mml,
            long_prefill_token_threshold=threshold,
            policy=policy,
            **scheduler,
        ),
        cache=CacheConfig(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=caching, groups=groups),
        speculation=SpeculationConfig(
            method=method if K else None,
            num_speculative_tokens=K,
            pad_resumed=pad,
            lookahead=lookahead,
            draft_slots=draft_slots,
        ),
        graphs=GraphConfig(mode="FULL_DECODE_ONLY" if graphs else "NONE", capture_sizes=capture_sizes),
    )


class Offers:
    """A connector's scheduler half whose answers the test dictates.

    ``prefix``: request id to the length of the prefix that can be had; ``asynchronous``: its loads take until the
    test reports them; ``later``: ids that get "later" for an answer. ``loads`` records what was allocated.
    """

    def __init__(
        self, prefix: Mapping[str, int] | None = None, *, asynchronous: bool = False, later: Sequence[str] = ()
    ) -> None:
        self.prefix = dict(prefix or {})
        self.asynchronous = asynchronous
        self.later = set(later)
        self.reads_after_finish: set[str] = set()
        self.asked: list[str] = []
        self.loads: list[tuple[str, int]] = []
        self.finished: list[str] = []

    def get_num_new_matched_tokens(self, request: Request, num_computed: int) -> tuple[int | None, bool]:
        self.asked.append(request.id)
        if request.id in self.later:
            return None, False
        most = request.num_tokens - (0 if self.asynchronous else 1)
        extra = max(0, min(self.prefix.get(request.id, 0), most) - num_computed)
        return extra, self.asynchronous and extra > 0

    def update_state_after_alloc(self, request: Request, blocks: Sequence[Sequence[int]], num_external: int) -> None:
        if num_external:
            self.loads.append((request.id, num_external))

    def build_connector_meta(self, plan: StepPlan) -> None:
        return None

    def request_finished(self, request: Request, blocks: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        self.finished.append(request.id)
        return request.id in self.reads_after_finish, None


def sync_connector(kind: str, prompts: Mapping[str, int], block_size: int = 16) -> SchedulerConnector:
    """``kind`` is decode_bench or mock; either resolves all but the last token of each prompt at once."""
    if kind == "decode_bench":
        return DecodeBenchScheduler(block_size)
    return Offers({name: length - 1 for name, length in prompts.items()})


class Drive:
    """A scheduler, the requests given to it, and everything that came out."""

    def __init__(self, config: EngineConfig, connector: SchedulerConnector | None = None) -> None:
        self.s = Scheduler(config, connector)
        self.K = config.speculation.num_speculative_tokens
        self.W = self.K + 1
        self.now = 0.0
        self.requests: dict[str, Request] = {}
        self.names: dict[int, str] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.current: StepPlan | None = None

    def add(
        self,
        name: str,
        prompt: int | Sequence[int] | TokenSource,
        *,
        max_tokens: int = 64,
        priority: int = 0,
        arrival: float | None = None,
        **more: Any,
    ) -> Request:
        """Queue a request; an int makes a prompt of that many tokens that no other request shares."""
        if isinstance(prompt, int):
            first = 1000 * (len(self.requests) + 1)
            prompt = range(first, first + prompt)
        source = StoredTokens(list(prompt)) if isinstance(prompt, Sequence) else prompt
        params = SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=tuple(more.pop("stop_token_ids", ())),
            ignore_eos=more.pop("ignore_eos", False),
        )
        request = Request(
            name, source, params, priority=priority, arrival=self.now if arrival is None else arrival, **more
        )
        self.s.add(request)
        self.requests[name] = request
        self.names[request.seq] = name
        self.tokens[name] = []
        return request

    def budget(self, tokens: int) -> None:
        """Change the budget of the steps to come: a way to get everybody admitted before it gets tight."""
        self.s.max_num_batched_tokens = tokens

    def plan(self) -> StepPlan:
        assert self.current is None
        self.current = self.s.plan(self.now)
        self.now += 0.01
        self.check()
        return self.current

    def rows(self) -> dict[str, Row]:
        """The rows of the plan in flight, by request, in their order."""
        assert self.current is not None
        return {self.names[row.seq]: row for row in self.current.rows}

    def widths(self) -> dict[str, int]:
        """Planned tokens by request."""
        return {name: row.n for name, row in self.rows().items()}

    def result(
        self,
        *,
        accept: int | Mapping[str, int] = 0,
        drafts: int | Mapping[str, int] | None = None,
        errors: Mapping[str, str] | None = None,
        transfers: Sequence[TransferEvent] = (),
    ) -> StepResult:
        """What an executor would return that accepts ``accept`` real drafts a row and proposes ``drafts`` (K) more."""
        assert self.current is not None
        failed = errors or {}
        sampled, nexts, wrong = [], [], {}
        for i, row in enumerate(self.current.rows):
            name = self.names[row.seq]
            if name in failed:
                wrong[i] = failed[name]
            real = len(row.drafts) - row.drafts.count(PLACEHOLDER)
            taken = min(accept if isinstance(accept, int) else accept.get(name, 0), real)
            sampled.append((*row.drafts[:taken], MODEL) if row.samples and name not in failed else ())
            count = drafts if isinstance(drafts, int) else (drafts or {}).get(name, self.K)
            nexts.append((DRAFT,) * count if row.samples else ())
        return StepResult(self.current.step, sampled, nexts, errors=wrong or None, transfers=transfers)

    def commit(self, **answer: Any) -> list[StepOutput]:
        outputs = self.s.commit(self.result(**answer), self.now)
        self.current = None
        self.take(outputs)
        self.check()
        return outputs

    def take(self, outputs: Sequence[StepOutput]) -> None:
        """Note outputs: a request has exactly one terminal one, and nothing after it."""
        for output in outputs:
            assert output.request_id not in self.ended
            self.tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self.ended[output.request_id] = output.finish_reason
            if output.error is not None:
                self.errors[output.request_id] = output.error

    def step(self, **answer: Any) -> dict[str, Row]:
        """Plan and commit; returns the rows that ran."""
        self.plan()
        rows = self.rows()
        self.commit(**answer)
        return rows

    def run(self, until: Callable[[], bool] | None = None, *, limit: int = 2000, **answer: Any) -> int:
        """Steps until ``until``, or until nothing is unfinished; returns how many it took."""
        for n in range(limit):
            if until() if until is not None else not self.s.has_work:
                return n
            self.step(**answer)
        raise AssertionError(f"not done after {limit} steps: {self.s.running}, waiting {list(self.s.waiting)}")

    def running(self, name: str, prompt: int | Sequence[int], **answer: Any) -> Request:
        """A request that has just been prefilled and decodes from the next step on, with K drafts by default."""
        request = self.add(name, prompt, max_tokens=400)
        self.run(lambda: request.num_tokens > request.num_prompt, **answer)
        return request

    def loaded(self, name: str, tokens: int = -1, *, error: str | None = None, failed: Sequence[int] = ()) -> None:
        """Plan and commit a step in which the load of ``name`` ends."""
        request = self.requests[name]
        event = TransferEvent("loaded", request.seq, request.generation, tokens, error, tuple(failed))
        self.step(transfers=[event])

    def owned(self) -> int:
        """Blocks that are not free."""
        return self.s.pool.num_usable - self.s.pool.num_free

    def check(self) -> None:
        """What holds after every operation, whatever was done."""
        s = self.s
        owners: dict[int, int] = {}
        tables = [t for r in self.requests.values() for t in r.tables] + s.transfers.tables()
        for table in tables:
            for block in table:
                if block != NULL_BLOCK:
                    owners[block] = owners.get(block, 0) + 1
        assert s.pool.owners() == owners, "a block leaks or has an owner that does not know it"
        assert s.pool.num_free + len(owners) == s.pool.num_usable
        waiting, holding = set(s.waiting), set(s.holding)
        for name, request in self.requests.items():
            places = [request in s.running, request in waiting, request in holding]
            assert sum(places) == (request.state is not State.FINISHED), f"{name} is in {places}"
            assert (request.state is State.RUNNING) == (request in s.running)
            assert (name in self.ended) <= (request.state is State.FINISHED)
        if self.current is not None:
            for name, row in self.rows().items():
                request = self.requests[name]
                known = row.n - len(row.drafts)
                assert 1 <= known <= request.num_tokens - row.start
                assert row.samples == (row.start + known == request.num_tokens)
                assert all(len(t) * s.kv.block_size >= row.start + row.n for t in request.tables)
