# SPDX-License-Identifier: Apache-2.0
"""What holds of a scheduler after every operation, and of every plan and commit."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from paceline.core.kv.pool import NULL_BLOCK
from paceline.core.passes import MISS_NEAR_MML, MISS_NO_BLOCKS
from paceline.core.plan import PLACEHOLDER, Row, StepPlan, StepResult
from paceline.core.request import Request, State
from paceline.core.scheduler import Scheduler

from .shadow import require

if TYPE_CHECKING:
    from .harness import World

HASH_BYTES = 16


class Before:
    """What is worth remembering of a scheduler from before a plan."""

    def __init__(self, s: Scheduler) -> None:
        self.owned = set(s.pool.owners())
        self.hash_of = dict(s.pool.index.hash_of)
        self.running = list(s.running)
        self.computed = {r: r.computed for r in s.requests.values()}
        self.drafts = {r: r.drafts for r in s.requests.values()}
        self.preemptions = {r: r.num_preemptions for r in s.requests.values()}

    def stale(self, s: Scheduler) -> list[int]:
        """Blocks that were free and got an owner for what they can hold, not for what they held."""
        now = s.pool.index.hash_of
        return [
            b
            for b in s.pool.owners()
            if b not in self.owned and (b not in self.hash_of or now.get(b) != self.hash_of[b])
        ]

    def preempted(self, s: Scheduler) -> list[Request]:
        return [r for r in s.requests.values() if r.num_preemptions > self.preemptions[r]]

    def at_commit(self, s: Scheduler) -> dict[Request, tuple[int, int, int]]:
        """(computed, tokens, preemptions) of every request, from right before a commit."""
        return {r: (r.computed, r.num_tokens, r.num_preemptions) for r in s.requests.values()}


def fingerprint(s: Scheduler) -> object:
    """All of a scheduler's state that a refused result might have touched."""
    return (
        s.pool.num_free,
        s.pool.owners(),
        list(s.pool.index.hash_of.items()),
        [
            (r.id, r.state, r.computed, r.num_tokens, list(r.output), r.drafts, r.fences, r.generation, r.hashed)
            for r in s.by_seq.values()
        ],
        [[t.copy() for t in r.tables] for r in s.by_seq.values()],
        [[r.id for r in queue] for queue in (s.running, s.waiting, s.holding)],
        [t.copy() for t in s.transfers.tables()],
        (s.stats.generated_tokens, s.stats.late_transfers, s.stats.load_failures, dict(s.stats.departures)),
        (s.stats.acceptance.num_draft_tokens, list(s.stats.acceptance.accepted_lengths)),
        s.step,
        s.has_work,
    )


def check_state(w: World) -> None:
    """Blocks, states and events; and, between steps, the content of everything that counts as computed."""
    _check_blocks(w)
    _check_states(w)
    if w.plan is None:
        _check_computed(w)
        _check_hashed(w)


def _check_blocks(w: World) -> None:
    """free + used = total; reference counts are owners; transfers under way own what they use."""
    s = w.scheduler
    owners: Counter[int] = Counter()
    for request in s.requests.values():
        mine = [b for table in request.tables for b in table if b != NULL_BLOCK]
        require(len(mine) == len(set(mine)), f"{request}: a block twice in {request.tables}")
        owners.update(mine)
    for table in s.transfers.tables():
        owners.update(b for b in table if b != NULL_BLOCK)
    counted = s.pool.owners()
    require(counted == owners, f"reference counts {counted}, owners {dict(owners)}")
    require(s.pool.num_free + len(counted) == s.pool.num_usable, "free + used blocks are not all blocks")
    require(NULL_BLOCK not in s.pool.index.hash_of, "the null block has a hash")
    for transfer in w.transport.under_way:
        free = [b for b in transfer.blocks(w.config.cache.block_size) if b not in counted]
        require(not free, f"blocks {free} are free under the {transfer.name}")


def _check_states(w: World) -> None:
    """Every request is in exactly one place, which is what its state says, and ends exactly once."""
    s = w.scheduler
    waiting, places = list(s.waiting), Counter[str]()
    for queue, states in (
        (s.running, (State.RUNNING,)),
        (waiting, (State.WAITING, State.PREEMPTED)),
        (s.holding, (State.LOADING, State.WAITING, State.PREEMPTED)),
    ):
        for request in queue:
            require(request.state in states, f"{request} is in the wrong place")
            places[request.id] += 1
    require(all(n == 1 for n in places.values()), f"a request is in two places: {places}")
    require(set(places) == set(s.requests), f"requests {set(s.requests)} are in {set(places)}")
    require(len(s.running) <= s.max_num_seqs, f"{len(s.running)} running")
    for name, request in w.requests.items():
        require((request.state is State.FINISHED) == (name not in s.requests), f"{request} is and is not finished")
    for request in waiting:
        require(not request.tables and not request.computed, f"{request} waits with blocks {request.tables}")


def _check_computed(w: World) -> None:
    """Whatever a request counts as computed holds the KV of its own tokens."""
    kv = w.executor.kv
    for request in w.scheduler.requests.values():
        computed = request.computed
        if request.state is State.LOADING and request.bad_from >= 0:
            computed = min(computed, request.bad_from * kv.block_size)
        if not computed:
            continue
        chain = w.texts[request.seq].chain
        for group, table in enumerate(request.tables):
            missing = kv.missing(group, table, computed, computed, chain)
            require(not missing, f"{request}: (block, slot) {missing} of {table} were never computed")


def _check_hashed(w: World) -> None:
    """Whatever can be hit holds the KV that its hash names."""
    size, kv = w.config.cache.block_size, w.executor.kv
    for request in w.by_seq.values():
        known = w.known_hashes.setdefault(request.seq, 0)
        if len(request.hashes) > known:
            chain = w.texts[request.seq].chain
            for i in range(known, len(request.hashes)):
                w.content_of[request.hashes[i]] = chain[i * size : (i + 1) * size]
            w.known_hashes[request.seq] = len(request.hashes)
    for block, key in w.scheduler.pool.index.hash_of.items():
        group = int.from_bytes(key[HASH_BYTES:], "little")
        content = w.content_of[key[:HASH_BYTES]]
        held = kv.cells[block] if kv.group_of[block] == group else []
        if kv.groups[group].kind == "recurrent":
            held, content = held[:1], content[-1:]
        require(held == content, f"block {block} can be hit in group {group} for KV that it does not hold")


def check_plan(w: World, plan: StepPlan, before: Before) -> None:
    """Budgets, rows, widths and the reasons for a miss; computed has advanced by what is planned."""
    s = w.scheduler
    cost = sum(row.n for row in plan.rows) + s.slots_per_row * len(plan.rows)
    require(cost <= s.max_num_batched_tokens, f"{plan.rows} cost {cost}")
    require(plan.tokens == sum(row.n for row in plan.rows), f"{plan.tokens} tokens for {plan.rows}")
    require(len({row.seq for row in plan.rows}) == len(plan.rows), f"two rows of one sequence: {plan.rows}")
    for row in plan.rows:
        request = w.by_seq[row.seq]
        known = row.n - len(row.drafts)
        require(request.state is State.RUNNING, f"a row for {request}")
        require(1 <= known <= request.num_tokens - row.start, f"{row} of {request}")
        require(row.samples == (row.start + known == request.num_tokens), f"{row} of {request}")
        require(row.start + row.n == request.computed <= s.max_model_len, f"{row} of {request}")
        real = row.drafts[: len(row.drafts) - row.drafts.count(PLACEHOLDER)]
        require(PLACEHOLDER not in real, f"{row}: placeholders come last")
        require(not row.drafts or row.samples, f"{row}: drafts behind a chunk that is not the last")
        require(real in ((), before.drafts[request]), f"{row}: drafts {real} of {before.drafts[request]}")
    for request, computed in before.computed.items():
        if request in before.running and request.state is State.RUNNING:
            start = next((row.start for row in plan.rows if row.seq == request.seq), request.computed)
            require(start == computed, f"{request}: computed was {computed}, is {start} at the start of its row")
    decodes = [row for row in plan.rows if _is_decode(w, row)]
    _check_widths(w, plan, before, decodes)
    _check_idle(w, plan, before)


def _is_decode(w: World, row: Row) -> bool:
    return row.samples and row.n - len(row.drafts) == 1


def _check_widths(w: World, plan: StepPlan, before: Before, decodes: list[Row]) -> None:
    s = w.scheduler
    widths = {row.n for row in plan.rows}
    uniform = widths.pop() if len(widths) == 1 and len(decodes) == len(plan.rows) else 0
    require(plan.width == uniform, f"width {plan.width} for {plan.rows}")
    missed = bool(plan.rows) and plan.width != s.width
    require(bool(plan.misses) == missed, f"misses {plan.misses} for width {plan.width} of {s.width}")
    prefill = len(decodes) < len(plan.rows) or bool(before.preempted(s))  # or planned and taken back
    for row in decodes:
        real = len(row.drafts) - row.drafts.count(PLACEHOLDER)
        if row.n == s.width or prefill or not s.graphs_on:
            continue
        near = row.start + s.width + 1 > s.max_model_len
        if row.n == 1 and near and MISS_NEAR_MML in plan.misses:
            continue
        if row.n == 1 + real and MISS_NO_BLOCKS in plan.misses:
            continue
        alone = not any(w.by_seq[other.seq] in before.running for other in plan.rows)
        unpadded = s.pad_resumed == "off" or (alone and (s.pad_resumed == "running" or row.start == 0))
        left_queue = w.by_seq[row.seq] not in before.running
        require(row.n == 1 and left_queue and unpadded, f"{row} is not {s.width} wide: {plan.misses}")


def _check_idle(w: World, plan: StepPlan, before: Before) -> None:
    """No step is empty while a row could run, and whoever runs gets a row before long."""
    s = w.scheduler
    fenced = any(r.fences for r in s.running)
    preempted = before.preempted(s)
    served = {row.seq for row in plan.rows}
    for request in s.running:
        if request.seq in served or preempted or fenced or request not in before.running:
            w.unserved[request.id] = 0
        else:
            w.unserved[request.id] = waited = w.unserved.get(request.id, 0) + 1
            require(waited <= s.max_num_seqs, f"{request} has had no row for {waited} steps")
    if plan.rows or preempted or not s.requests:
        return
    if plan.load_meta:
        return
    require(not s.running or fenced, f"nobody runs, of {s.running}")
    if s.running:
        return
    outstanding = bool(w.transport.under_way)
    for request in [*s.holding, *s.waiting]:
        if request.state is State.LOADING:
            continue
        if w.is_later(request):
            outstanding = True
            continue
        tokens = min(request.num_tokens + s.width + s.lookahead, s.max_model_len)
        held = sum(map(len, request.tables))
        wanted = s.kv.blocks_for(tokens) * len(s.kv.groups) - held
        loads = w.offers_load(request)
        require(loads or wanted > s.pool.num_free, f"{request} could run: {wanted} of {s.pool.num_free} free blocks")
        break
    require(outstanding, f"nobody runs, and nothing is under way: {list(s.requests.values())}")


def check_commit(
    w: World,
    plan: StepPlan,
    result: StepResult,
    tainted: set[int],
    seen: dict[Request, tuple[int, int, int]],
) -> None:
    """computed falls by what was rejected, by preemption or by a failure of this step, and by nothing else."""
    s = w.scheduler
    failures = bool(result.errors) or any(e.error is not None for e in result.transfers)
    rows = {row.seq: (i, row) for i, row in enumerate(plan.rows)}
    for request, (computed, tokens, preemptions) in seen.items():
        if request.state is not State.RUNNING:
            continue
        i, row = rows.get(request.seq, (-1, None))
        taken = len(result.sampled[i]) if row is not None else 0
        rejected = len(row.drafts) + 1 - taken if row is not None and taken else 0
        if request.num_preemptions == preemptions and not (failures and request.computed <= computed):
            require(request.computed == computed - rejected, f"{request}: computed was {computed}, rejected {rejected}")
            require(request.num_tokens == tokens + taken, f"{request} took {request.num_tokens - tokens} of {taken}")
        if i in tainted:
            require(request.num_tokens == tokens, f"{request} took tokens of a row that read KV never computed")
        if request.num_tokens > request.computed and request.drafts:
            require(request.num_tokens - request.computed == 1, f"{request} has drafts and a prompt to compute")
    for i in tainted:
        request = w.by_seq[plan.rows[i].seq]
        if request.state is State.FINISHED:
            require(not result.sampled[i] or w.ended[request.id] in ("error", "abort"), f"{request} ended on bad KV")
    for name in w.ended:
        require(name not in s.requests, f"{name} ended and is still there")
