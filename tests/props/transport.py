# SPDX-License-Identifier: Apache-2.0
"""A KV connector for tests: what it offers, and a transport that moves KV in a `ShadowKV`, badly if asked to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from paceline.connectors.decode_bench.scheduler import Fill
from paceline.core.kv.pool import NULL_BLOCK
from paceline.core.plan import StepPlan, TransferEvent
from paceline.core.request import Request, State

from .shadow import GARBAGE, Cell, ShadowKV, Text, require

NEVER = 1 << 40
"""A step that does not come."""

Outcome = Literal["all", "part", "failure"]


@dataclass
class Offer:
    """What can be had for one request.

    ``tokens``: length of the prefix in all. ``later``: for how many steps from the first question on the answer is
    "later". ``steps``: how long an asynchronous load takes (`NEVER`: its peer is frozen). ``reads``: for how many steps
    the finished request is read, 0 for not at all.
    """

    tokens: int = 0
    is_async: bool = False
    later: int = 0
    steps: int = 1
    outcome: Outcome = "all"
    reads: int = 0


@dataclass
class Transfer:
    """A load (``is_load``) into, or a read of, positions [``start``, ``stop``) of a request.

    ``tables``: its blocks when the transfer began. ``ends_at``: the step in whose result the end is reported.
    ``text``: what a load brings. ``seen``: what a read found in each block.
    """

    request: Request
    tables: list[list[int]]
    start: int
    stop: int
    is_load: bool
    ends_at: int
    is_async: bool = True
    outcome: Outcome = "all"
    text: Text = field(default_factory=Text)
    seen: dict[int, list[int]] = field(default_factory=dict)
    generation: int = field(init=False)

    def __post_init__(self) -> None:
        self.generation = self.request.generation

    @property
    def name(self) -> str:
        kind = "load" if self.is_load else "read"
        return f"{kind} of {self.request.id} (sequence {self.request.seq}, generation {self.generation})"

    def blocks(self, block_size: int) -> list[int]:
        """Blocks that must be left alone until it ends."""
        first, last = self.start // block_size, -(-self.stop // block_size)
        return [b for table in self.tables for b in table[first:last] if b != NULL_BLOCK]


class ScriptedConnector:
    """The scheduler's half. ``offers``: by request id. ``step`` is set by the driver.

    ``whole``: asynchronous loads bring the last token too. ``reads``: reads of requests that finished just now.
    """

    def __init__(self, *, whole: bool) -> None:
        self.offers: dict[str, Offer] = {}
        self.step = 0
        self.whole = whole
        self.reads: list[Transfer] = []
        self._started: list[Transfer] = []
        self._finished: set[str] = set()
        self._asked_at: dict[str, int] = {}
        self._local: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Request, num_computed: int) -> tuple[int | None, bool]:
        offer = self.offers.get(request.id)
        if offer is None:
            return 0, False
        if self.step < self._asked_at.setdefault(request.id, self.step) + offer.later:
            return None, False
        self._local[request.id] = num_computed
        most = request.num_tokens - (0 if offer.is_async and self.whole else 1)
        extra = max(0, min(offer.tokens, most) - num_computed)
        return extra, offer.is_async and extra > 0

    def update_state_after_alloc(self, request: Request, blocks: Sequence[Sequence[int]], num_external: int) -> None:
        if not num_external:
            return
        offer, start = self.offers[request.id], self._local[request.id]
        load = Transfer(request, copied(blocks), start, start + num_external, True, self.step)
        load.ends_at += offer.steps
        load.is_async, load.outcome = offer.is_async, offer.outcome
        load.text.extend(request.tokens(0, load.stop))
        self._started.append(load)

    def build_connector_meta(self, plan: StepPlan) -> list[Transfer] | None:
        started, self._started = self._started, []
        return started or None

    def request_finished(self, request: Request, blocks: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        require(request.id not in self._finished, f"{request.id} finished twice")
        self._finished.add(request.id)
        offer = self.offers.get(request.id)
        if offer is None or not offer.reads or not request.computed or not request.tables:
            return False, None
        ends_at = self.step + offer.reads
        self.reads.append(Transfer(request, copied(blocks), 0, request.computed, False, ends_at))
        return True, None


def copied(tables: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(table) for table in tables]


class Transport:
    """Moves KV: a load writes garbage while it runs and the right content at its end.

    ``reported``: every event so far, with the request that it was about.
    """

    def __init__(self, kv: ShadowKV, rng: Random) -> None:
        self.kv = kv
        self.rng = rng
        self.under_way: list[Transfer] = []
        self.reported: list[tuple[TransferEvent, Request]] = []

    def begin(self, transfer: Transfer) -> None:
        """Start an asynchronous load or a read."""
        self.under_way.append(transfer)
        if transfer.is_load:
            self._write(transfer, [GARBAGE] * (transfer.stop - transfer.start))
            return
        size = self.kv.block_size
        for group, table in zip(self.kv.groups, transfer.tables, strict=True):
            for i, block in enumerate(table[: -(-transfer.stop // size)]):
                # The state of a running sequence changes in place, so nobody can read it meanwhile.
                if block != NULL_BLOCK and group.kind != "recurrent":
                    transfer.seen[block] = self.kv.cells[block][: transfer.stop - i * size]

    def load_now(self, transfer: Transfer) -> tuple[TransferEvent | None, set[Cell]]:
        """A synchronous load: complete, or failed with the cells that it left empty."""
        if transfer.outcome != "failure":
            self._write(transfer, transfer.text.chain[transfer.start :])
            return None, set()
        return self._fail(transfer)

    def events(self, step: int) -> list[TransferEvent]:
        """Transfers that end in ``step``, each once."""
        return [self._end(t) for t in [t for t in self.under_way if t.ends_at <= step]]

    def writing(self) -> set[int]:
        """Blocks that loads under way may write at any time."""
        return {b for t in self.under_way if t.is_load for b in t.blocks(self.kv.block_size)}

    def noise(self) -> TransferEvent | None:
        """An event that was reported before, or one of a sequence or a generation that does not exist."""
        draw = self.rng.random()
        if draw < 0.2 or not self.reported:
            return TransferEvent(self.rng.choice(("loaded", "saved")), 10_000, 0)
        event, request = self.rng.choice(self.reported)
        if draw < 0.4:
            return TransferEvent(event.kind, event.seq, event.generation + 1000)
        if event.kind == "saved":  # a second read of one generation has no name of its own
            reading = any(t.request is request and not t.is_load for t in self.under_way)
            return None if reading or request.state is not State.FINISHED else event
        return event

    def _end(self, transfer: Transfer) -> TransferEvent:
        self.under_way.remove(transfer)
        if not transfer.is_load:
            for block, seen in transfer.seen.items():
                now = self.kv.cells[block][: len(seen)]
                require(now == seen, f"block {block} changed under the {transfer.name}")
            event = self._event(transfer)
        elif transfer.outcome == "failure":
            event, _ = self._fail(transfer)
        elif transfer.outcome == "part" and (stop := self.rng.randint(transfer.start, transfer.stop)) < transfer.stop:
            self._write(transfer, transfer.text.chain[transfer.start : stop])
            event = self._event(transfer, tokens=stop)
        else:
            self._write(transfer, transfer.text.chain[transfer.start :])
            event = self._event(transfer, tokens=self.rng.choice((-1, transfer.stop)))
        self.reported.append((event, transfer.request))
        return event

    def _write(self, transfer: Transfer, contents: Sequence[int]) -> None:
        """The first of a load's positions; recurrent state arrives with the last one or not at all."""
        whole = transfer.start + len(contents) == transfer.stop
        for group, table in enumerate(transfer.tables):
            if whole or self.kv.groups[group].kind != "recurrent":
                self.kv.write(group, table, transfer.start, contents, transfer.name)

    def _fail(self, transfer: Transfer) -> tuple[TransferEvent, set[Cell]]:
        """Some blocks did not arrive. An event that names none means all."""
        blocks = transfer.blocks(self.kv.block_size)
        some = self.rng.sample(blocks, self.rng.randint(1, len(blocks))) if self.rng.random() < 0.6 else []
        self._write(transfer, transfer.text.chain[transfer.start :])
        for block in some or blocks:
            self.kv.erase(block)
        lost = {(block, slot) for block in some or blocks for slot in range(self.kv.block_size)}
        return self._event(transfer, error="connection lost", failed=some), lost

    def _event(
        self, transfer: Transfer, tokens: int = -1, error: str | None = None, failed: Sequence[int] = ()
    ) -> TransferEvent:
        kind = "loaded" if transfer.is_load else "saved"
        return TransferEvent(kind, transfer.request.seq, transfer.generation, tokens, error, tuple(failed))


def fill(kv: ShadowKV, fills: Sequence[Fill], texts: dict[int, Text], tables: dict[int, list[list[int]]]) -> None:
    """What the decode benchmark's worker half does, with the right content in place of constants."""
    for f in fills:
        total = len(texts[f.seq]) - 1
        start = total - f.tokens
        first, last = start // kv.block_size, -(-total // kv.block_size)
        for group, table in enumerate(tables[f.seq]):
            blocks = tuple(b for b in table[first:last] if b != NULL_BLOCK)
            require(f.blocks[group] == blocks, f"{f}: not the blocks of sequence {f.seq}")
            kv.write(group, table, start, texts[f.seq].chain[start:total], f"fill of sequence {f.seq}")
