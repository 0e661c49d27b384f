# SPDX-License-Identifier: Apache-2.0
"""The waiting scan: who is looked at, what was already computed elsewhere, and who joins the step."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from paceline.core import departures as d
from paceline.core.kv.manager import Hit
from paceline.core.passes import MISS_NEAR_MML, MISS_NEW, MISS_PREFILL, MISS_RESUMED, Pass
from paceline.core.request import Loading, Request, State
from paceline.core.running import add_prefill, prefill_share
from paceline.core.verifier import pad, pads_on_leaving_queue, width_fits

if TYPE_CHECKING:
    from paceline.core.scheduler import Scheduler


class Outcome(Enum):
    """What became of a waiting request that was looked at."""

    ADMITTED = 0
    LOADING = 1  # holds blocks, no forward work yet
    ASIDE = 2  # keeps its place; the scan goes on
    END = 3  # keeps its place; the scan ends
    QUEUED = 4  # holds nothing any more: back in the queue


def scan_waiting(s: Scheduler, p: Pass, running_rows: int) -> None:
    """Requests that hold blocks first, in start order, then the queue. Called only if nobody was left out.

    ``running_rows``: rows of running requests in this step, for the padding rule.
    """
    looked_at: set[Request] = set()
    aside: list[Request] = []
    while p.budget + p.placeholders > p.slots_per_row and len(s.running) < s.max_num_seqs:
        request = next((r for r in s.holding if r not in looked_at), None) if s.holding else None
        held = request is not None
        if request is None:
            if not s.waiting:
                break
            request = s.waiting.pop()
        looked_at.add(request)
        if p.budget <= p.slots_per_row:
            s.depart(d.PROVISIONAL_PADDING)
        outcome = _consider(s, p, request, running_rows)
        if outcome is Outcome.ADMITTED and held:
            s.holding.remove(request)
        elif outcome is Outcome.QUEUED:
            looked_at.discard(request)
        elif outcome is Outcome.LOADING and not held:
            s.hold(request)
        elif outcome is Outcome.ASIDE and not held:
            aside.append(request)
        elif outcome is Outcome.END:
            if not held:
                aside.append(request)
            break
    for request in reversed(aside):
        s.waiting.put_back(request)


def _consider(s: Scheduler, p: Pass, request: Request, running_rows: int) -> Outcome:
    if request.state is State.LOADING:
        if not s.end_load(request):
            return Outcome.ASIDE
        if not request.tables:
            return Outcome.QUEUED
    if request.tables:  # resolved: whoever holds blocks is not asked again
        if not request.computed:
            s.depart(d.RESOLVED_STATE)
        return _admit(s, p, request, None, request.computed, 0, running_rows)
    hit = s.kv.lookup(request, drop_last=s.drops_last_hit)
    external, is_async = _ask_connector(s, request, hit.tokens, p.now)
    if external is None:
        return Outcome.ASIDE
    if is_async and external:
        return _start_load(s, p, request, hit, external)
    return _admit(s, p, request, hit, hit.tokens + external, external, running_rows)


def _ask_connector(s: Scheduler, request: Request, local: int, now: float) -> tuple[int | None, bool]:
    """Tokens beyond the local hit. A connector that says "later" for too long is taken at 0."""
    if s.connector is None or not request.ask:
        return 0, False
    external, is_async = s.connector.get_num_new_matched_tokens(request, local)
    if external is not None:
        request.first_asked = None
        # the last token is always computed here; it may be loaded too, unless a recurrent state could not go back to it
        most = request.num_tokens - local - (not is_async or s.kv.has_recurrent)
        external = max(0, min(external, most))
        if external and request.num_preemptions and s.refills:
            s.depart(d.REFILL)
        return external, is_async
    if request.first_asked is None:
        request.first_asked = now
    if now - request.first_asked < s.later_deadline_s:
        return None, False
    s.depart(d.LATER_DEADLINE)
    request.ask = False
    return 0, False


def _start_load(s: Scheduler, p: Pass, request: Request, hit: Hit, external: int) -> Outcome:
    """Allocate for the loaded tokens only; the request waits, holding its blocks, until they arrive."""
    slots = min(hit.tokens + external, s.max_model_len)
    free = s.kv.pool.num_free
    if s.kv.needed(request, min(request.num_tokens, s.max_model_len), hit) > free:
        return Outcome.END
    needed = s.kv.needed(request, slots, hit) + _promised(s)
    first_step = s.kv.blocks_for(s.width + s.lookahead) * len(s.kv.groups) if s.K else 0
    if needed + first_step > free:
        if needed > free or s.running or any(r.tables for r in s.holding):
            return Outcome.END
        s.depart(d.LOAD_RESERVE)
    s.kv.admit(request, hit)
    s.kv.grow(request, slots, None, states_from=slots)
    _tell_connector(s, request, external)
    request.state = State.LOADING
    request.computed = hit.tokens
    request.loading = Loading(hit.tokens + external, p.now + s.transfer_deadline_s)
    s.partial[request] = None
    s.count_hit(request, hit.tokens, external)
    return Outcome.LOADING


def _promised(s: Scheduler) -> int:
    """Blocks that requests which load, have loaded, or are part-way through their prompt still need."""
    extra = s.width + s.lookahead if s.K else 0
    return sum(s.kv.needed(r, min(r.num_tokens, s.max_model_len) + extra) for r in s.partial)


def _tell_connector(s: Scheduler, request: Request, external: int) -> None:
    if s.connector is not None:
        s.connector.update_state_after_alloc(request, request.tables, external)


def _admit(
    s: Scheduler, p: Pass, request: Request, hit: Hit | None, resolved: int, external: int, running_rows: int
) -> Outcome:
    """Let a request join the step if its share, its whole sequence and its own slots fit.

    ``resolved`` is what the prefix cache and the connector found computed, the value that the padding rule sees.
    """
    known = request.num_tokens - resolved
    drafts: tuple[int, ...] = ()
    reason = ""
    if known == 1:
        drafts, reason = _drafts_on_leaving_queue(s, p, resolved, running_rows)
        n = 1 + len(drafts)
        if n + p.slots_per_row > p.budget:
            return Outcome.END
    else:
        share = p.budget + p.placeholders - p.slots_per_row
        n = prefill_share(s, p, resolved, request.num_tokens, share)
        if n <= 0:
            return Outcome.END
    free = s.kv.pool.num_free
    slots = min(resolved + n + s.lookahead, s.max_model_len)
    whole = min(request.num_tokens, s.max_model_len)
    if s.kv.needed(request, whole, hit) > free or s.kv.needed(request, slots, hit) > free:
        return Outcome.END
    if hit is not None:
        s.kv.admit(request, hit)
        s.count_hit(request, hit.tokens, external)
        s.kv.grow(request, resolved, None, states_from=max(1, resolved))
    s.kv.grow(request, slots, None, states_from=resolved + n if known > 1 else 1)
    _tell_connector(s, request, external)
    _join(s, p, request, resolved)
    if known > 1:
        add_prefill(s, p, request, n)
        if request.computed < request.num_tokens:
            s.partial[request] = None
    else:
        if drafts:
            p.mark_padded(request, len(drafts), 1)
        if n != s.width:
            p.reasons[request] = reason
        p.add(request, n, drafts, True)
        s.hash_planned(p, request)
    return Outcome.ADMITTED


def _drafts_on_leaving_queue(s: Scheduler, p: Pass, resolved: int, running_rows: int) -> tuple[tuple[int, ...], str]:
    """Placeholders for a request with one token left to compute, or why it gets none."""
    if not s.K:
        return (), MISS_NEW
    missed = MISS_RESUMED if resolved else MISS_NEW
    if not pads_on_leaving_queue(s.pad_resumed, running_in_step=running_rows > 0, resolved=resolved):
        return (), missed
    if p.prefill:
        if not p.running_prefill:
            s.depart(d.PROVISIONAL_PADDING)
        return (), MISS_PREFILL
    if not width_fits(resolved, s.width, s.max_model_len):
        return (), MISS_NEAR_MML
    if 0 < p.threshold < s.width:
        s.depart(d.PREFILL_THRESHOLD)
    return pad((), s.K), missed


def _join(s: Scheduler, p: Pass, request: Request, resolved: int) -> None:
    """Enter the running list; the executor learns about the request and its block tables."""
    s.introduce(p, request)
    p.updates += s.kv.replace_updates(request)
    if not s.running:
        s.stats.idle_admissions += 1
    s.running.append(request)
    request.state = State.RUNNING
    request.computed = resolved
    request.loading = None
