# SPDX-License-Identifier: Apache-2.0
"""Applying a step's result: checked as a whole, then committed row by row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING

import msgspec

from paceline.core import departures as d
from paceline.core.passes import Pass
from paceline.core.plan import (
    InvalidResult,
    Row,
    StepOutput,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TransferEvent,
    validate_transfers,
)
from paceline.core.request import FinishReason, Request, State
from paceline.core.transfers import first_bad_block, give_back

if TYPE_CHECKING:
    from paceline.core.scheduler import Scheduler


NOTHING: tuple[int, ...] = ()
RUNNING = State.RUNNING


def validate_result(plan: StepPlan, result: StepResult, num_speculative_tokens: int) -> None:
    """Check every row before any is committed.

    Raises:
        InvalidResult: wrong step or row count; a sampling row without a token or with more than its drafts allow;
            accepted tokens that are not the drafts (a placeholder never is); tokens for a row that does not sample; too
            many or negative next drafts; log-probabilities that are not those of the sampled tokens; a failed load of
            a row without an error.
    """
    rows, sampled, errors = plan.rows, result.sampled, result.errors
    count = len(rows)
    if result.step != plan.step:
        raise InvalidResult(f"result of step {result.step} for step {plan.step}")
    if len(sampled) != count:
        raise InvalidResult(f"{len(sampled)} samples for {count} rows")
    if len(result.next_drafts) not in (0, count):
        raise InvalidResult(f"{len(result.next_drafts)} next drafts for {count} rows")
    if errors and not all(0 <= i < count for i in errors):
        raise InvalidResult(f"errors for rows {sorted(errors)} of {count}")
    if result.failed_loads and not result.failed_loads.keys() <= (errors or {}).keys():
        raise InvalidResult(f"failed loads of rows {sorted(result.failed_loads)}, errors of {sorted(errors or {})}")
    if result.logprobs is not None:
        _validate_logprobs(sampled, result.logprobs)
    if result.transfers:
        validate_transfers(result.transfers)
    nexts = result.next_drafts or repeat(NOTHING)
    if not errors and _valid_at_a_glance(rows, sampled, nexts, num_speculative_tokens):
        return
    for i, (row, tokens, drafts) in enumerate(zip(rows, sampled, nexts, strict=False)):
        _validate_row(i, row, tokens, drafts, num_speculative_tokens, bool(errors and i in errors))


def _valid_at_a_glance(
    rows: Iterable[Row],
    sampled: Iterable[tuple[int, ...]],
    nexts: Iterable[tuple[int, ...]],
    num_speculative_tokens: int,
) -> bool:
    """Whether every row samples and is in order: True for almost every step, False asks `_validate_row`.

    Placeholders come last, so the last accepted draft tells for all of them.
    """
    for row, tokens, drafts in zip(rows, sampled, nexts, strict=False):
        k = len(tokens)
        if k == 1:
            if not row.samples:
                return False
        else:
            verified = row.drafts
            if not 1 < k <= len(verified) + 1 or tokens[:-1] != verified[: k - 1] or verified[k - 2] < 0:
                return False
        if tokens[-1] < 0 or len(drafts) > num_speculative_tokens or (drafts and min(drafts) < 0):
            return False
    return True


def _validate_row(
    i: int, row: Row, tokens: tuple[int, ...], drafts: tuple[int, ...], num_speculative_tokens: int, failed: bool
) -> None:
    """The rules for one row, one by one, for what the loop above could not pass at a glance."""
    k, verified = len(tokens), row.drafts
    if k and failed:
        raise InvalidResult(f"row {i}: tokens {tokens} beside an error")
    if k and not row.samples:
        raise InvalidResult(f"row {i}: tokens {tokens} for a prefill chunk that is not the last")
    if row.samples and not k and not failed:
        raise InvalidResult(f"row {i}: no token and no error")
    if k and (k > len(verified) + 1 or tokens[:-1] != verified[: k - 1] or min(tokens) < 0):
        raise InvalidResult(f"row {i}: sampled {tokens} with drafts {verified}")
    if len(drafts) > num_speculative_tokens or (drafts and min(drafts) < 0):
        raise InvalidResult(f"row {i}: next drafts {drafts} with num_speculative_tokens = {num_speculative_tokens}")


def _validate_logprobs(
    sampled: Sequence[tuple[int, ...]], logprobs: Sequence[tuple[TokenLogprobs, ...] | None]
) -> None:
    if len(logprobs) != len(sampled):
        raise InvalidResult(f"log-probabilities of {len(logprobs)} rows for {len(sampled)} rows")
    for i, (tokens, scored) in enumerate(zip(sampled, logprobs, strict=True)):
        if scored is not None and tuple(entry.token_id for entry in scored) != tokens:
            raise InvalidResult(f"row {i}: log-probabilities of other tokens than the sampled {tokens}")


def commit_rows(s: Scheduler, p: Pass, result: StepResult, outputs: list[StepOutput]) -> None:
    """Append what was sampled, take back what was rejected, and end who is done.

    accepted = len(sampled) - 1 and rejected = drafts - accepted: a padded row ends one short of its token
    count, ready for real drafts.
    """
    lengths = s.stats.acceptance.accepted_lengths
    nexts = result.next_drafts or repeat(NOTHING)
    emit = outputs.append
    ended = False
    first = len(outputs)
    drafted = -_uncount_placeholders(s, p, result) if p.padded else 0
    for request, row, tokens, drafts in zip(p.requests, p.rows, result.sampled, nexts, strict=False):
        k = len(tokens)
        if not k:
            continue
        if request.state is not RUNNING:  # started over because of somebody else's failed row
            s.stats.generated_tokens -= k
            continue
        verified = len(row.drafts)
        if verified:
            request.computed -= verified + 1 - k
            lengths[k - 1] += 1
            drafted += verified
        request.output.extend(tokens)
        total = request.num_tokens + k
        if total < request.max_total and request.stop_ids.isdisjoint(tokens):
            request.num_tokens = total
            request.drafts = drafts
            emit(StepOutput(request.id, tokens))
        else:
            ended = _commit_with_stop(s, request, tokens, drafts, outputs) or ended
    s.stats.acceptance.num_draft_tokens += drafted
    if ended:
        s.running = [r for r in s.running if r.state is State.RUNNING]
    if result.logprobs is not None:
        _attach_logprobs(p, result.logprobs, outputs, first)


def _attach_logprobs(
    p: Pass, logprobs: Sequence[tuple[TokenLogprobs, ...] | None], outputs: list[StepOutput], first: int
) -> None:
    """Complete the outputs from index ``first`` on; log-probabilities are cut where the tokens were."""
    scored = {r.id: entries for r, entries in zip(p.requests, logprobs, strict=False) if entries is not None}
    for i in range(first, len(outputs)):
        output = outputs[i]
        if output.token_ids and (entries := scored.get(output.request_id)) is not None:
            outputs[i] = msgspec.structs.replace(output, logprobs=entries[: len(output.token_ids)])


def _uncount_placeholders(s: Scheduler, p: Pass, result: StepResult) -> int:
    """Take placeholders, and rows that carry nothing else, out of the counts; returns placeholders verified."""
    placeholders = 0
    for request, width in p.padded.items():
        i = p.requests.index(request)
        tokens = result.sampled[i]
        if not tokens or request.state is not State.RUNNING:
            continue
        placeholders += p.rows[i].n - width
        if width == 1:
            s.stats.acceptance.accepted_lengths[len(tokens) - 1] -= 1
    return placeholders


def _commit_with_stop(
    s: Scheduler, request: Request, tokens: tuple[int, ...], drafts: tuple[int, ...], outputs: list[StepOutput]
) -> bool:
    """Check for a stop after each token as if they came one at a time; cut behind the first. True if it ended."""
    stop_reason: int | None = None
    for i, token in enumerate(tokens):
        request.num_tokens += 1
        if token in request.stop_ids and request.num_tokens - request.num_prompt > request.params.min_tokens:
            reason = FinishReason.STOP
            stop_reason = None if token == request.eos_token_id and not request.params.ignore_eos else token
        elif request.num_tokens >= request.max_total:
            reason = FinishReason.LENGTH
        else:
            continue
        cut = len(tokens) - 1 - i
        if cut:
            del request.output[-cut:]
            s.stats.generated_tokens -= cut
            request.computed = min(request.computed, request.num_tokens)
        s.finish(request, reason, outputs, tokens=tokens[: i + 1], stop_reason=stop_reason)
        return True
    request.drafts = drafts
    outputs.append(StepOutput(request.id, tokens))
    return False


def commit_errors(s: Scheduler, p: Pass, result: StepResult, outputs: list[StepOutput]) -> list[TransferEvent]:
    """End the requests whose rows failed; whoever read KV that such a row should have written starts over.

    Called before the rows are committed. A failed synchronous load, told with the row's error or as the end of the
    transfer, does not end its request under policy ``recompute``: it computes from the first bad block. Nor does it
    ever end one for which nothing was to be loaded: suspected of a load whose blocks nobody knows, it merely runs
    again. Returns the transfer events that are left to apply.
    """
    reported = {(e.seq, e.generation): e for e in result.transfers if e.kind == "loaded" and e.error is not None}
    found = result.failed_loads or {}
    answered: set[int] = set()
    for i, message in sorted((result.errors or {}).items()):
        request, row = p.requests[i], p.rows[i]
        event, told = reported.get((request.seq, request.generation)), found.get(i)
        if event is not None:
            answered.add(id(event))
        if request.state is not State.RUNNING:
            continue
        lost = [] if event is None else [event.failed_blocks]
        lost += [] if told is None else [told]
        first = min((first_bad_block(s, request, blocks) for blocks in lost), default=row.start // s.kv.block_size)
        loaded = any(lost) or event is not None or row.start > request.local_tokens
        if lost and loaded:
            s.stats.load_failures += 1
            request.ask = False
        if lost and (s.load_failure_policy == "recompute" or not loaded):
            bad = _rewind(s, request, first)
        else:
            s.depart(d.UNSAMPLED_ERROR)
            bad = s.kv.unhash_from(request, min(first, _first_unwritten(s, p, request, row)))
            s.running.remove(request)
            s.finish(request, FinishReason.ERROR, outputs, error=message)
        _spread(s, set(bad), request)
    return [event for event in result.transfers if id(event) not in answered]


def _first_unwritten(s: Scheduler, p: Pass, request: Request, row: Row) -> int:
    """First block whose hash a failed row must lose: hashed in this pass, or hashed before but written by the row."""
    before = p.hashed_before(request)
    return min(request.hashed if before is None else before, row.start // s.kv.block_size)


def _rewind(s: Scheduler, request: Request, first: int) -> list[int]:
    """Computed falls to block ``first``; the request goes on as a prefill. Returns blocks not to be trusted."""
    blocks = s.kv.unhash_from(request, first)
    if not s.kv.can_rewind:
        s.send_back(request)
        return blocks
    request.computed = min(request.computed, first * s.kv.block_size)
    request.drafts = ()
    s.partial[request] = None
    return blocks


def _spread(s: Scheduler, bad: set[int], source: Request) -> None:
    """Sharers of blocks that hold no valid KV: running ones start over, loading ones trust less of their load."""
    sharers = [r for r in (*reversed(s.running), *s.holding) if r is not source]
    while bad:
        spread: set[int] = set()
        for request in sharers.copy():
            hits = [i for t in request.tables for i, b in enumerate(t) if b in bad]
            if hits:
                sharers.remove(request)
                spread.update(_distrust(s, request, min(hits)))
        bad = spread  # what sharers computed on top of it is as bad, and may be shared in turn


def _distrust(s: Scheduler, request: Request, first: int) -> list[int]:
    """``request`` must not rely on its blocks from index ``first`` on; returns those that others could hit."""
    blocks = s.kv.unhash_from(request, first)
    if request.state is State.RUNNING:
        s.send_back(request)
    elif request.loading is not None:
        request.bad_from = first if request.bad_from < 0 else min(request.bad_from, first)
    else:
        request.computed = min(request.computed, first * s.kv.block_size) if s.kv.can_rewind else 0
        if not request.computed:
            give_back(s, request)
    return blocks
