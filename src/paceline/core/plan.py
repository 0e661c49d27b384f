# SPDX-License-Identifier: Apache-2.0
"""What crosses the seam between the core and an executor: a frozen plan out, a frozen result back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from paceline.core.request import SamplingParams, TokenSource

PLACEHOLDER = -1
"""A draft that only widens its row: never embedded, never scored, always rejected."""


class Row(msgspec.Struct, frozen=True, gc=False):
    """One sequence's share of a step.

    Positions [start, start + n) are computed: ``n - len(drafts)`` known tokens, then the drafts.
    ``samples`` is False for a prefill chunk that is not the last.
    """

    seq: int
    start: int
    n: int
    drafts: tuple[int, ...]
    samples: bool


class NewSequence(msgspec.Struct, frozen=True):
    """What an executor must know about a sequence before its first row; ``seq`` names it from then on."""

    seq: int
    request_id: str
    source: TokenSource
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()


class BlockUpdate(msgspec.Struct, frozen=True):
    """A change to one block table: the whole table if ``replace``, else blocks for its end."""

    seq: int
    group: int
    replace: bool
    blocks: Sequence[int]


class TransferEvent(msgspec.Struct, frozen=True):
    """The end of a KV transfer, reported by a worker.

    ``kind`` is ``loaded`` or ``saved``. ``tokens`` is how many tokens arrived in all (loads; -1: all that were
    promised). ``error`` set: the transfer failed, and ``failed_blocks`` are the blocks that hold no valid KV
    (empty: all of them).
    """

    kind: str
    seq: int
    generation: int
    tokens: int = -1
    error: str | None = None
    failed_blocks: tuple[int, ...] = ()


def validate_transfers(events: Sequence[TransferEvent]) -> None:
    """Check every event before any is applied.

    Raises:
        InvalidResult: a ``kind`` that is not one of the two.
    """
    for event in events:
        if event.kind not in ("loaded", "saved"):
            raise InvalidResult(f"transfer event of sequence {event.seq}: kind {event.kind!r} is not loaded or saved")


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    """One rank's decision for one step.

    ``tokens`` is the sum of the rows' n. ``width`` is the common width of a step of decode rows, 0 if the step is
    not uniform or empty. ``first``, ``blocks`` and ``retired`` are applied in this order, before the rows
    run; ``retired`` sequences are never named again. ``misses`` says why a step with rows is not uniform W.
    ``preempted``: sequences whose blocks may be overwritten from this step on.
    """

    step: int
    rows: Sequence[Row]
    tokens: int
    width: int
    first: Sequence[NewSequence] = ()
    blocks: Sequence[BlockUpdate] = ()
    retired: Sequence[int] = ()
    load_meta: Any = None
    misses: Sequence[str] = ()
    preempted: Sequence[int] = ()


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities (natural) at one output position, of the model's own distribution before any sampling option.

    ``top``: (id, log-probability) of the most likely tokens, best first, as many as were asked for. ``rank``: of
    ``token_id`` among all tokens, 1 for the most likely.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """What an executor returns for a plan, row by row.

    ``sampled[i]``: the accepted drafts of row i followed by one token of the model; empty iff the row does not
    sample or carries an error. ``next_drafts[i]``: at most K proposals. ``logprobs``: None where nobody
    asked, else one entry per row, aligned with ``sampled[i]`` or None. ``errors``: row index to message.
    ``failed_loads``: the rows among them whose KV could not be loaded, with the blocks that hold no valid KV (empty:
    nobody knows, so none that was to be loaded for this row is to be trusted). Durations are in seconds.

    The commit may drop tokens (behind a stop, or of a row that read bad KV), so an executor forgets whatever it
    sampled beyond the start of a sequence's next row.
    """

    step: int
    sampled: Sequence[tuple[int, ...]]
    next_drafts: Sequence[tuple[int, ...]] = ()
    logprobs: Sequence[tuple[TokenLogprobs, ...] | None] | None = None
    errors: Mapping[int, str] | None = None
    failed_loads: Mapping[int, tuple[int, ...]] | None = None
    transfers: Sequence[TransferEvent] = ()
    load_s: float = 0.0
    forward_s: float = 0.0
    draft_s: float = 0.0


class InvalidResult(RuntimeError):
    """The executor broke its contract; nothing of the result was committed."""


class StepOutput(msgspec.Struct, frozen=True, gc=False):
    """What one request gained in one step. Exactly one output of a request carries a ``finish_reason``.

    ``finish_reason``: stop, length, abort or error, the words of the OpenAI API (error and abort are ours).
    ``stop_reason``: the stop token id that ended it, if any. ``error``: what went wrong, for people.
    ``logprobs``: one entry per token of a request that asked. ``kv_transfer_params``: the connector's answer at the end
    of a request whose KV somebody will pull.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    kv_transfer_params: dict[str, Any] | None = None
