# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of KV transfers: arrivals, failures, deadlines, and blocks that must not be touched yet.

Who may free a block of a transfer? While it loads: nobody, an abort only marks it. At its end: the
request, if it still lives, else this module, once. Past its deadline: nobody, until the transport confirms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from paceline.core import departures as d
from paceline.core.kv.pool import NULL_BLOCK
from paceline.core.plan import StepOutput, TransferEvent
from paceline.core.request import FinishReason, Request, State

if TYPE_CHECKING:
    from paceline.core.scheduler import Scheduler

Name = tuple[int, int]
"""(sequence, generation): what a transfer is called."""


class HeldBlocks(msgspec.Struct):
    """Block tables that no request answers for any more, and the transfers that must end before they are free."""

    tables: list[list[int]]
    deadline: float
    loads: int = 0
    saves: int = 0

    def ended(self, kind: str) -> bool:
        """Count the end of one transfer of this kind; False if none was under way."""
        if kind == "loaded" and self.loads:
            self.loads -= 1
        elif kind == "saved" and self.saves:
            self.saves -= 1
        else:
            return False
        return True


class Transfers:
    """Blocks held for transfers whose request has gone, by transfer name.

    ``held``: an aborted load, or a finished request that a connector still reads. ``quarantined``: transfers that were
    given up without their transport confirming that it will not touch the blocks any more; these are not work.
    """

    __slots__ = ("held", "quarantined", "recheck")

    def __init__(self) -> None:
        self.held: dict[Name, HeldBlocks] = {}
        self.quarantined: dict[Name, HeldBlocks] = {}
        self.recheck = False

    @property
    def num_quarantined_blocks(self) -> int:
        """Distinct blocks that stay out of use until a transport confirms."""
        return len({b for held in self.quarantined.values() for t in held.tables for b in t if b != NULL_BLOCK})

    def quarantine(self, name: Name, held: HeldBlocks) -> None:
        """Give a transfer up; whoever waits may be too long for what is left."""
        self.quarantined[name] = held
        self.recheck = True

    def tables(self) -> list[list[int]]:
        """Every table held here (for owner counts)."""
        return [t for group in (self.held, self.quarantined) for h in group.values() for t in h.tables]


def hold_blocks(s: Scheduler, request: Request, *, loads: int = 0, saves: int = 0) -> None:
    """Keep blocks that ``request`` gives up until its transfers have ended (if it has any blocks)."""
    deadline = s.now + s.transfer_deadline_s
    if loads and request.loading is not None:
        deadline = request.loading.deadline
    elif request.fences:
        deadline = request.fence_deadline
    if any(request.tables):
        s.transfers.held[request.seq, request.generation] = HeldBlocks(request.tables, deadline, int(loads), saves)
    s.kv.clear(request)
    request.fences = 0


def apply_event(s: Scheduler, event: TransferEvent, outputs: list[StepOutput]) -> None:
    """The end of a transfer, exactly once: a repeated, late or unknown one is counted and frees nothing twice."""
    name = (event.seq, event.generation)
    for store in (s.transfers.held, s.transfers.quarantined):
        held = store.get(name)
        if held is not None and held.ended(event.kind):
            if not held.loads and not held.saves:
                s.kv.release_tables(store.pop(name).tables)
            return
    request = s.by_seq.get(event.seq)
    loading = request.loading if request is not None else None
    if request is None or event.generation != request.generation:
        s.stats.late_transfers += 1
    elif event.kind == "saved":
        if request.fences:
            request.fences -= 1
        else:
            s.stats.late_transfers += 1
    elif loading is None or loading.arrived is not None:
        s.stats.late_transfers += 1
    elif event.error is None:
        loading.arrived = loading.tokens if event.tokens < 0 else min(event.tokens, loading.tokens)
    else:
        _fail_load(s, request, event, outputs)


def _fail_load(s: Scheduler, request: Request, event: TransferEvent, outputs: list[StepOutput]) -> None:
    """The load ended without all of its tokens: the request ends in error, or computes from the first bad block."""
    s.stats.load_failures += 1
    loading = request.loading
    assert loading is not None
    loading.arrived = 0
    if s.load_failure_policy == "fail":
        s.finish(request, FinishReason.ERROR, outputs, error=f"KV load failed: {event.error}")
        return
    request.ask = False
    loading.arrived = min(loading.tokens, first_bad_block(s, request, event.failed_blocks) * s.kv.block_size)


def first_bad_block(s: Scheduler, request: Request, failed: Sequence[int]) -> int:
    """Index of the first of the ``failed`` blocks; if it holds none of them, of the first beyond the local hit."""
    bad = (i for t in request.tables for i, b in enumerate(t) if b in failed)
    return min(bad, default=request.local_tokens // s.kv.block_size)


def end_load(s: Scheduler, request: Request) -> bool:
    """Promote a loading request whose load has ended: what arrived is computed, and can be hit by others.

    The last token is always computed here, so that there is something to sample from.
    """
    loading = request.loading
    assert loading is not None
    if loading.arrived is None:
        return False
    tokens = min(max(loading.arrived, request.local_tokens), request.num_tokens)
    if request.bad_from >= 0:
        tokens = min(tokens, request.bad_from * s.kv.block_size)
        request.bad_from = -1
    if tokens < loading.tokens and not s.kv.can_rewind:
        tokens = 0
    _stop_loading(request)
    if tokens:
        request.computed = tokens
        s.kv.hash_planned(request, tokens)
        request.computed = min(tokens, request.num_tokens - 1)
    else:
        request.ask = False  # a connector that brings nothing would be asked for ever
        give_back(s, request)
    return True


def _stop_loading(request: Request) -> None:
    """A load under the present name is over; the next has a name of its own."""
    request.loading = None
    request.generation += 1
    request.state = State.PREEMPTED if request.num_preemptions else State.WAITING


def give_back(s: Scheduler, request: Request) -> None:
    """A request that held blocks keeps none of them: back in the queue, it looks up again."""
    s.kv.release(request)
    request.computed = 0
    s.partial.pop(request, None)
    s.holding.remove(request)
    s.waiting.put_back(request)


def give_up_overdue(s: Scheduler, now: float, outputs: list[StepOutput]) -> None:
    """Past its deadline a transfer has failed; its blocks are quarantined until the transport confirms."""
    for name in [name for name, held in s.transfers.held.items() if now >= held.deadline]:
        s.depart(d.LOAD_DEADLINE)
        s.transfers.quarantine(name, s.transfers.held.pop(name))
    for request in [r for r in s.holding if r.loading is not None]:
        loading = request.loading
        if loading is not None and loading.arrived is None and now >= loading.deadline:
            _give_up_load(s, request, loading.deadline, outputs)
    if s.transfers.recheck:
        s.transfers.recheck = False
        for request in [r for r in (*s.holding, *s.waiting) if not s.fits_alone(r)]:
            s.finish(request, FinishReason.ERROR, outputs, error="too long for the KV blocks that are not quarantined")


def _give_up_load(s: Scheduler, request: Request, deadline: float, outputs: list[StepOutput]) -> None:
    s.depart(d.LOAD_DEADLINE)
    s.stats.load_failures += 1
    local = request.local_tokens // s.kv.block_size  # the load never writes what was hit
    s.kv.release_tables([table[:local] for table in request.tables])
    loaded = HeldBlocks([table[local:] for table in request.tables], deadline, loads=1)
    s.transfers.quarantine((request.seq, request.generation), loaded)
    s.kv.clear(request)
    _stop_loading(request)
    request.computed = 0
    request.ask = False
    if s.load_failure_policy == "fail" or not s.fits_alone(request):
        s.finish(request, FinishReason.ERROR, outputs, error="KV load did not end before its deadline")
    else:
        give_back(s, request)
