# SPDX-License-Identifier: Apache-2.0
"""What the offline engine returns; names follow vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.core.plan import TokenLogprobs
from paceline.core.stats import SchedulerStats


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's natural log-probability, its ``rank`` (1: the likeliest), and its text alone."""

    logprob: float
    rank: int
    decoded_token: str


def position_logprobs(entry: TokenLogprobs, decode: Callable[[Sequence[int]], str]) -> dict[int, Logprob]:
    """By id: the token of one output position first, then the likeliest, best first."""
    found = {entry.token_id: Logprob(entry.logprob, entry.rank, decode([entry.token_id]))}
    for rank, (token, logprob) in enumerate(entry.top, 1):
        if token not in found:
            found[token] = Logprob(logprob, rank, decode([token]))
    return found


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion.

    ``text`` has no special tokens, and ends before the stop string or stop token that ended it; ``token_ids``
    include them. ``finish_reason``: stop, length, or error. ``stop_reason``: the stop string or stop token id,
    None for the model's own end of text. ``error``: what went wrong, for people.

    ``logprobs``: one mapping per token, if they were asked for: the token and the likeliest ones, by id.
    ``cumulative_logprob``: the sum over the tokens.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: int | str | None = None
    error: str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result for one prompt; ``prompt`` is None when the prompt was given as ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    finished: bool = True


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Totals since the engine started; placeholder drafts are in none of them.

    ``num_drafts``: verifications that carried a draft. ``num_accepted_tokens_per_pos``: how often the draft at
    each position was accepted. ``acceptance_length``: mean tokens per verification, the model's own included.
    ``prefix_queries`` and ``prefix_hits``: tokens looked up in the prefix cache and found there.
    ``forward_s`` and ``draft_s``: seconds spent in forward passes, sampling included, and in drafting.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]
    acceptance_length: float
    steps: int
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    forward_s: float
    draft_s: float

    @classmethod
    def of(cls, stats: SchedulerStats, forward_s: float, draft_s: float) -> EngineStats:
        """Read the counters of a scheduler."""
        acceptance = stats.acceptance
        return cls(
            num_drafts=acceptance.num_drafts,
            num_draft_tokens=acceptance.num_draft_tokens,
            num_accepted_tokens=acceptance.num_accepted_tokens,
            num_accepted_tokens_per_pos=tuple(acceptance.num_accepted_tokens_per_pos),
            acceptance_length=acceptance.acceptance_length,
            steps=stats.busy_steps,
            prompt_tokens=stats.prompt_tokens,
            generated_tokens=stats.generated_tokens,
            preemptions=stats.preemptions,
            prefix_queries=stats.prefix_queries,
            prefix_hits=stats.prefix_hits,
            forward_s=forward_s,
            draft_s=draft_s,
        )
