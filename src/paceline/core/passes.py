# SPDX-License-Identifier: Apache-2.0
"""The state of one scheduling pass, and what can be undone within it."""

from __future__ import annotations

import msgspec

from paceline.core.plan import BlockUpdate, NewSequence, Row
from paceline.core.request import Request

MISS_PREFILL = "prefill"
MISS_RESUMED = "qlen_1_resumed"
MISS_NEW = "qlen_1_new"
MISS_SHORT = "short_drafts"
MISS_NEAR_MML = "near_mml"
MISS_NO_BLOCKS = "no_blocks"


class Pass:
    """A plan in the making. ``rows`` and ``requests`` run in parallel.

    ``budget``: token slots left. ``placeholders``: slots that padding would give back to a prefill.
    ``padded``: padded requests and the width each falls back to. ``prefill_rows``: requests whose row is a
    prefill row. ``prefill``: a prefill row was planned in this pass, taken back since or not;
    ``running_prefill``: one of them belonged to a running request.
    ``fenced``: the row just tried found a victim whose blocks a transfer reads.
    ``hashed``: requests that hashed blocks in this pass, with how many were hashed before it.
    """

    __slots__ = (
        "budget",
        "fenced",
        "first",
        "hashed",
        "now",
        "padded",
        "placeholders",
        "preempted",
        "prefill",
        "prefill_rows",
        "reasons",
        "requests",
        "rows",
        "running_prefill",
        "self_victim",
        "slots_per_row",
        "threshold",
        "unserved",
        "updates",
    )

    def __init__(self) -> None:
        self.now = 0.0
        self.budget = 0
        self.slots_per_row = 0
        self.threshold = 0
        self.placeholders = 0
        self.prefill = False
        self.running_prefill = False
        self.self_victim = False
        self.fenced = False
        self.rows: list[Row] = []
        self.requests: list[Request] = []
        self.updates: list[BlockUpdate] = []
        self.first: list[NewSequence] = []
        self.unserved: list[Request] = []
        self.padded: dict[Request, int] = {}
        self.prefill_rows: dict[Request, None] = {}
        self.reasons: dict[Request, str] = {}
        self.hashed: list[tuple[Request, int]] = []
        self.preempted: list[Request] = []

    def begin(self, now: float, budget: int, slots_per_row: int, threshold: int) -> None:
        """Start over. What the last plan took with it is made anew, the rest is emptied where it was used."""
        self.now = now
        self.budget = budget
        self.slots_per_row = slots_per_row
        self.threshold = threshold
        self.fenced = False
        self.rows = []
        self.requests = []
        if self.updates:
            self.updates = []
        if self.first:
            self.first = []
        if self.unserved:
            self.unserved = []
        if self.hashed:
            self.hashed = []
        self.placeholders = 0
        self.prefill = self.running_prefill = self.self_victim = False
        if self.padded or self.prefill_rows or self.reasons or self.preempted:
            self.padded = {}
            self.prefill_rows = {}
            self.reasons = {}
            self.preempted = []

    def add(self, request: Request, n: int, drafts: tuple[int, ...], samples: bool) -> None:
        """Plan a row from the request's computed tokens on, and pay for it."""
        self.rows.append(Row(request.seq, request.computed, n, drafts, samples))
        self.requests.append(request)
        request.computed += n
        self.budget -= n + self.slots_per_row

    def mark_padded(self, request: Request, placeholders: int, width: int) -> None:
        """The row of ``request`` falls back to ``width`` tokens if a prefill joins the step."""
        self.padded[request] = width
        self.placeholders += placeholders

    def drop_padding(self) -> None:
        """A prefill row joined the step: padding can no longer keep it uniform, so nobody pays for it."""
        for request, width in self.padded.items():
            i = self.requests.index(request)
            row = self.rows[i]
            dropped = row.n - width
            self.rows[i] = msgspec.structs.replace(row, n=width, drafts=row.drafts[: len(row.drafts) - dropped])
            request.computed -= dropped
            self.budget += dropped
            self.reasons[request] = MISS_PREFILL
        self.padded.clear()
        self.placeholders = 0

    def take_back(self, request: Request) -> bool:
        """Undo the row of a preempted request: tokens, slots and padding return. False if it had none."""
        if request not in self.requests:
            return False
        i = self.requests.index(request)
        row = self.rows.pop(i)
        del self.requests[i]
        self.budget += row.n + self.slots_per_row
        width = self.padded.pop(request, row.n)
        self.placeholders -= row.n - width
        self.prefill_rows.pop(request, None)
        self.updates[:] = [u for u in self.updates if u.seq != request.seq]
        return True

    def hashed_before(self, request: Request) -> int | None:
        """Blocks of ``request`` that were hashed before this pass, None if it hashed none in it."""
        return min((before for r, before in self.hashed if r is request), default=None)

    def width(self, full_width: int) -> int:
        """The common width of a step of decode rows, 0 if there is none."""
        if not self.rows:
            return 0
        if not self.reasons and not self.prefill_rows:  # the only rows without a reason are W wide
            return full_width
        if any(r in self.prefill_rows for r in self.requests):
            return 0
        n = self.rows[0].n
        return n if all(row.n == n for row in self.rows) else 0

    def misses(self) -> list[str]:
        """Why this step is not uniform W: each reason once, in row order."""
        found: dict[str, None] = {}
        for request in self.requests:
            if request in self.prefill_rows:
                found[MISS_PREFILL] = None
            elif request in self.reasons:
                found[self.reasons[request]] = None
        return list(found)
