# SPDX-License-Identifier: Apache-2.0
"""A model without weights that reads its KV cache through block tables, and complains about what it finds there.

The "KV" of a position is a number chained from every token up to it. A row first writes its own positions, then
reads all positions that it attends to and requires the right number at each: a block that was never computed, was
computed for another prompt, or has two owners that differ, fails the test at once. What it samples depends on the
true tokens alone, so its output is the same however a request was scheduled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.core.config import CacheConfig, EngineConfig
from paceline.core.connector import SchedulerConnector
from paceline.core.kv.pool import NULL_BLOCK
from paceline.core.plan import PLACEHOLDER, Row, StepPlan, StepResult, TransferEvent
from paceline.core.request import Request

from .driving import Drive

VOCABULARY = 50
Drafter = Callable[[int, int], tuple[int, int]]
"""(sequence, token count) to how many drafts are proposed, and how many of these are right."""


def chain(previous: int, token: int) -> int:
    """The number of a position, from that of the one before it."""
    return hash((previous, token))


def next_token(number: int) -> int:
    """The greedy continuation of a text whose last position has ``number``."""
    return number % VOCABULARY


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """The ``count`` tokens that follow ``prompt``, whatever engine computes them."""
    number = 0
    for token in prompt:
        number = chain(number, token)
    out = []
    for _ in range(count):
        out.append(next_token(number))
        number = chain(number, out[-1])
    return out


class ToyModel:
    """Executes plans over a shadow of the KV cache, in all cache groups."""

    def __init__(self, cache: CacheConfig, drafter: Drafter) -> None:
        self.block_size = cache.block_size
        self.groups = cache.groups
        self.drafter = drafter
        self.kv: dict[tuple[int, int, int], int] = {}
        self.states: dict[tuple[int, int], tuple[int, int]] = {}
        self.ids: dict[int, list[int]] = {}
        self.tables: dict[tuple[int, int], list[int]] = {}
        self.blind = False
        """Reads are not checked: for steps that are known to read what is not there."""

    def run(self, plan: StepPlan, errors: dict[int, str] | None = None, **more: Any) -> StepResult:
        """The result of a plan; rows in ``errors`` (by index) write nothing and sample nothing."""
        failed = errors or {}
        self.learn(plan)
        for row in plan.rows:
            if row.samples:  # what stands behind its last known token was sampled and not committed
                del self.ids[row.seq][row.start + row.n - len(row.drafts) :]
        live = [row for i, row in enumerate(plan.rows) if i not in failed]
        for row in live:
            self.write(row.seq, self.row_ids(row), row.start, row.start + row.n)
        for row in live if not self.blind else ():
            self.read(row)
        sampled: list[tuple[int, ...]] = []
        nexts: list[tuple[int, ...]] = []
        for i, row in enumerate(plan.rows):
            tokens = self.sample(row) if row.samples and i not in failed else ()
            sampled.append(tokens)
            self.ids[row.seq] += tokens
            nexts.append(self.propose(row.seq) if tokens else ())
            if i not in failed:
                self.keep_state(row, len(tokens))
        return StepResult(plan.step, sampled, nexts, errors=failed or None, **more)

    def learn(self, plan: StepPlan) -> None:
        for new in plan.first:
            self.ids[new.seq] = list(new.source.tokens(0, new.source.length))
        for update in plan.blocks:
            at = (update.seq, update.group)
            self.tables[at] = list(update.blocks) if update.replace else self.tables[at] + list(update.blocks)
        for seq in plan.retired:
            del self.ids[seq]
            for g in range(len(self.groups)):
                self.tables.pop((seq, g), None)

    def row_ids(self, row: Row) -> list[int]:
        """Prompt, output so far and this row's drafts."""
        known = row.start + row.n - len(row.drafts)
        return self.ids[row.seq][:known] + list(row.drafts)

    def numbers(self, ids: Sequence[int]) -> list[int]:
        out, number = [], 0
        for token in ids:
            number = chain(number, token)
            out.append(number)
        return out

    def write(self, seq: int, ids: Sequence[int], start: int, stop: int) -> None:
        """Put positions [start, stop) of a text into the blocks of ``seq``."""
        numbers = self.numbers(ids)
        for g, group in enumerate(self.groups):
            if group.kind == "recurrent":
                continue
            table = self.tables[seq, g]
            for position in range(start, stop):
                block = table[position // self.block_size]
                assert block != NULL_BLOCK, f"position {position} of {seq} would be written to the null block"
                self.kv[g, block, position % self.block_size] = numbers[position]

    def read(self, row: Row) -> None:
        ids = self.row_ids(row)
        numbers = self.numbers(ids)
        known = row.start + row.n - len(row.drafts)
        for g, group in enumerate(self.groups):
            table = self.tables[row.seq, g]
            if group.kind == "recurrent":
                self.read_state(row, g, numbers)
                continue
            first = 0 if group.kind == "full" else max(0, row.start - group.sliding_window + 1)
            for position in range(first, known):
                found = self.kv.get((g, table[position // self.block_size], position % self.block_size))
                assert found == numbers[position], (
                    f"group {g}: sequence {row.seq} read position {position} of block"
                    f" {table[position // self.block_size]}: {'wrong' if found is not None else 'never computed'}"
                )

    def read_state(self, row: Row, g: int, numbers: Sequence[int]) -> None:
        if not row.start:
            return
        block = self.tables[row.seq, g][(row.start - 1) // self.block_size]
        found = self.states.get((g, block))
        assert found == (row.start, numbers[row.start - 1]), (
            f"group {g}: sequence {row.seq} needs the state after {row.start} tokens,"
            f" block {block} has that after {found[0] if found else 'none'}"
        )

    def keep_state(self, row: Row, sampled: int) -> None:
        """A recurrent group keeps the state after the last token that counts, in that token's block."""
        computed = row.start + row.n - len(row.drafts) + max(0, sampled - 1)
        self.keep_state_of(row.seq, self.ids[row.seq][:computed])

    def keep_state_of(self, seq: int, ids: Sequence[int]) -> None:
        for g, group in enumerate(self.groups):
            if group.kind == "recurrent" and ids:
                block = self.tables[seq, g][(len(ids) - 1) // self.block_size]
                assert block != NULL_BLOCK, f"the state of {seq} would be written to the null block"
                self.states[g, block] = (len(ids), self.numbers(ids)[-1])

    def sample(self, row: Row) -> tuple[int, ...]:
        known = row.start + row.n - len(row.drafts)
        number = self.numbers(self.ids[row.seq][:known])[-1]
        out: list[int] = []
        for draft in (*row.drafts, PLACEHOLDER):
            token = next_token(number)
            out.append(token)
            if draft != token:
                break
            number = chain(number, token)
        return tuple(out)

    def propose(self, seq: int) -> tuple[int, ...]:
        ids = self.ids[seq]
        count, right = self.drafter(seq, len(ids))
        truth = continuation(ids, count)
        return tuple(t if i < right else (t + 1) % VOCABULARY for i, t in enumerate(truth))


class ToyDrive(Drive):
    """A scheduler whose plans are executed by the toy model."""

    def __init__(
        self, config: EngineConfig, connector: SchedulerConnector | None = None, drafter: Drafter | None = None
    ) -> None:
        super().__init__(config, connector)
        self.toy = ToyModel(config.cache, drafter or (lambda seq, length: (self.K, (seq + length) % (self.K + 1))))

    def result(self, **answer: Any) -> StepResult:
        assert self.current is not None
        named = answer.pop("errors", None) or {}
        rows = list(self.current.rows)
        errors = {i: named[self.names[row.seq]] for i, row in enumerate(rows) if self.names[row.seq] in named}
        lost = answer.pop("failed_loads", None) or {}
        failed_loads = {i: lost[self.names[row.seq]] for i, row in enumerate(rows) if self.names[row.seq] in lost}
        return self.toy.run(self.current, errors, failed_loads=failed_loads or None, **answer)

    def fill(self, request: Request, stop: int, *, start: int = 0) -> None:
        """What a connector's worker does: puts positions [start, stop) of a request into its blocks."""
        for g, table in enumerate(request.tables):
            self.toy.tables[request.seq, g] = list(table)
        self.toy.write(request.seq, request.tokens(0, request.num_tokens), start, stop)
        self.toy.keep_state_of(request.seq, request.tokens(0, stop))

    def arrives(self, name: str, tokens: int) -> TransferEvent:
        """The load of ``name`` brings its first ``tokens`` tokens; report the event in a step's ``transfers``."""
        request = self.requests[name]
        assert request.loading is not None
        self.fill(request, tokens, start=request.local_tokens)
        return TransferEvent("loaded", request.seq, request.generation, tokens)

    def assert_right(self) -> None:
        """Every request that ended well said what the model says."""
        for name, reason in self.ended.items():
            if reason in ("length", "stop"):
                request = self.requests[name]
                prompt = request.source.tokens(0, request.num_prompt)
                assert self.tokens[name] == continuation(prompt, len(self.tokens[name])), name
