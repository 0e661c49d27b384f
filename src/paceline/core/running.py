# SPDX-License-Identifier: Apache-2.0
"""Running requests in one pass: how wide a row is, whose blocks make room, who is left for the next step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core import departures as d
from paceline.core.passes import (
    MISS_NEAR_MML,
    MISS_NO_BLOCKS,
    MISS_PREFILL,
    MISS_SHORT,
    Pass,
)
from paceline.core.plan import Row
from paceline.core.queue import rank_key
from paceline.core.request import Request, State
from paceline.core.verifier import pad, real_drafts, width_fits

if TYPE_CHECKING:
    from paceline.core.scheduler import Scheduler


RUNNING = State.RUNNING


def _serving_order(s: Scheduler) -> list[Request]:
    """List order, beginning with the first request that the last step left out."""
    order = s.running.copy()
    for request in s.unserved:
        if request.state is State.RUNNING and request in order:
            i = order.index(request)
            if i:
                s.depart(d.ROUND_ROBIN)
            return order[i:] + order[:i]
    return order


def serve_all(s: Scheduler, p: Pass) -> None:
    """One row per running request while the budget lasts.

    The loop's own branch is a row with all K drafts whose blocks are there; `serve_running` decides the rest.
    """
    order = _serving_order(s) if s.unserved else s.running.copy()
    K, width, partial = s.K, s.width, s.partial
    cost, reach = width + s.slots_per_row, width + s.lookahead
    last_start = s.max_model_len - width - 1
    budget, updates = p.budget, p.updates
    grow, hash_planned = s.kv.grow, s.kv.hash_planned
    add_row, add_request = p.rows.append, p.requests.append
    for i, request in enumerate(order):
        start = request.computed
        drafts = request.drafts
        if len(drafts) == K and cost <= budget and (K or request not in partial):
            if start < request.clear_until:
                add_row(Row(request.seq, start, width, drafts, True))
                add_request(request)
                request.computed = start + width
                budget -= cost
                continue
            if (
                request.state is RUNNING
                and start <= last_start
                and (start + reach <= request.capacity or grow(request, start + reach, updates))
            ):
                add_row(Row(request.seq, start, width, drafts, True))
                add_request(request)
                request.computed = start + width
                budget -= cost
                if request.num_tokens >= request.hash_at:
                    p.hashed.append((request, request.hashed))
                    hash_planned(request, request.num_tokens)
                continue
        p.budget = budget
        if not serve_running(s, p, request):
            if not p.fenced:
                p.unserved += [r for r in order[i:] if r.state is RUNNING]
                return
            p.fenced = False
            p.unserved.append(request)  # those behind it may run: one of them must, for the fence to fall
        if p.self_victim and any(r.state is RUNNING for r in order[i + 1 :]):
            s.depart(d.SELF_VICTIM)
        budget = p.budget
    p.budget = budget


def serve_running(s: Scheduler, p: Pass, request: Request) -> bool:
    """Plan a row for a running request. False: it and all behind it are unserved in this pass."""
    if request.state is not State.RUNNING:
        return True  # preempted earlier in this pass
    if request.num_tokens - request.computed == 1:
        return _serve_decode(s, p, request)
    return _serve_prefill(s, p, request)


def _serve_decode(s: Scheduler, p: Pass, request: Request) -> bool:
    """A decode row is whole or absent: its width is fixed before the budget is looked at."""
    drafts, reason = decode_drafts(s, p, request)
    n = 1 + len(drafts)
    if n + p.slots_per_row > p.budget:
        if p.budget > p.slots_per_row:
            s.depart(d.WHOLE_ROW)
        return False
    while not s.kv.grow(request, request.computed + n + s.lookahead, p.updates):
        real = real_drafts(drafts)
        if real < len(drafts):
            s.depart(d.NO_BLOCKS)
            drafts, n, reason = drafts[:real], 1 + real, MISS_NO_BLOCKS
            continue
        made_room = preempt_for(s, p, request)
        if made_room is None:
            return False
        if not made_room:
            return True
    placeholders = len(drafts) - real_drafts(drafts)
    if placeholders:
        p.mark_padded(request, placeholders, n - placeholders)
    if n != s.width:
        p.reasons[request] = reason
    if request in s.partial and not s.graphs_on:
        p.prefill = p.running_prefill = True
    request.drafts = ()
    p.add(request, n, drafts, True)
    s.hash_planned(p, request)
    return True


def decode_drafts(s: Scheduler, p: Pass, request: Request) -> tuple[tuple[int, ...], str]:
    """The drafts of a running decode row, padded if graphs are on, and why the row would not be W wide.

    The one-token last chunk of a running prefill is such a row too; without graphs it counts as a prefill.
    """
    drafts = request.drafts
    last_chunk = request in s.partial
    if not s.K:
        return (), MISS_PREFILL
    checked = s.width if s.graphs_on else 1 + len(drafts)
    if not width_fits(request.computed, checked, s.max_model_len):
        room = s.max_model_len - request.computed - 1
        if drafts and min(1 + len(drafts), room) != 1:
            s.depart(d.NEAR_MML)
        return (), MISS_NEAR_MML
    if s.graphs_on and len(drafts) < s.K:
        if p.prefill:
            return drafts, MISS_PREFILL
        s.depart(d.GRAPH_PADDING)
        return pad(drafts, s.K), MISS_SHORT
    return drafts, MISS_PREFILL if last_chunk else MISS_SHORT


def _serve_prefill(s: Scheduler, p: Pass, request: Request) -> bool:
    """A prefill row takes its share of the budget, the slots of placeholders included."""
    share = p.budget + p.placeholders - p.slots_per_row
    n = prefill_share(s, p, request.computed, request.num_tokens, share)
    if n <= 0:
        return False
    end = request.computed + n
    while not s.kv.grow(request, end + s.lookahead, p.updates, states_from=end):
        made_room = preempt_for(s, p, request)
        if made_room is None:
            return False
        if not made_room:
            return True
    p.running_prefill = True
    add_prefill(s, p, request, n)
    return True


def add_prefill(s: Scheduler, p: Pass, request: Request, n: int) -> None:
    """Plan a prefill row whose blocks are allocated; from here on padding is of no use in this step."""
    if p.padded:
        s.depart(d.PROVISIONAL_PADDING)
        p.drop_padding()
    p.prefill = True
    p.prefill_rows[request] = None
    p.add(request, n, (), request.computed + n >= request.num_tokens)
    s.hash_planned(p, request)


def prefill_share(s: Scheduler, p: Pass, start: int, num_tokens: int, share: int) -> int:
    """Tokens of a prefill chunk: threshold, budget, and block boundaries where recurrent state must be kept."""
    n = num_tokens - start
    if 0 < p.threshold < n:
        n = p.threshold
    n = min(n, share, s.max_model_len - 1 - start)
    if s.kv.has_recurrent and n > 0:
        n = align_chunk(start, n, num_tokens, s.kv.block_size)
    return n


def align_chunk(start: int, n: int, num_tokens: int, block_size: int) -> int:
    """Cut a chunk so that a recurrent state falls on the last block boundary that a later request can hit.

    Chunks end on block boundaries until that boundary is reached; the rest is one unaligned chunk.

    >>> align_chunk(0, 50, 80, 16), align_chunk(48, 32, 80, 16), align_chunk(64, 16, 80, 16)
    (48, 16, 16)
    """
    boundary = (num_tokens - 1) // block_size * block_size
    end = start + n
    if start >= boundary:
        return n
    return min(end, boundary) // block_size * block_size - start


def preempt_for(s: Scheduler, p: Pass, request: Request) -> bool | None:
    """Preempt one request so that ``request`` may grow.

    Returns:
        True: try again. False: ``request`` itself was the victim. None: the victim's blocks are fenced, so
        preempting it would free nothing, and ``request`` is left out of this pass.
    """
    victim = choose_victim(s, p.now)
    if victim.fences and p.now < victim.fence_deadline:
        p.fenced = True
        return None
    preempt(s, p, victim)
    if victim is request:
        p.self_victim = True
        return False
    return True


def choose_victim(s: Scheduler, now: float) -> Request:
    """FCFS: the last of the list. Priority: the worst in one total order.

    Blocks under a fence past its deadline would go to quarantine, not to the pool: such requests come last.
    """
    running = [r for r in s.running if not r.fences or now < r.fence_deadline] or s.running
    if not s.by_priority:
        return running[-1]
    victim = max(running, key=rank_key)
    worst = (victim.priority, victim.arrival)
    if sum((r.priority, r.arrival) == worst for r in running) > 1:
        s.depart(d.TOTAL_ORDER)
    return victim


def preempt(s: Scheduler, p: Pass, victim: Request) -> None:
    """Take a running request's blocks; it starts over from its prefix hits."""
    p.preempted.append(victim)
    before = p.hashed_before(victim) if p.take_back(victim) else None
    if before is not None:
        s.depart(d.UNHASH)
        s.kv.unhash_from(victim, before)
    s.send_back(victim)
