# SPDX-License-Identifier: Apache-2.0
"""Drafting by prompt lookup: what followed the last time these tokens occurred."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.core.lockstep import Agreement
from paceline.execution.drafter import Verified
from paceline.execution.kvcache import Array, KVCache


class NgramDrafter:
    """Finds the longest suffix n-gram, ``shortest`` to ``longest`` tokens, that occurred before, at its first
    occurrence, and proposes the tokens that followed it (vLLM's ``ngram`` method chooses so too).

    The search compares arrays and keeps no index: a few vectorised passes over the sequence, the second and later
    ones only over positions that still match.
    """

    taps: tuple[int, ...] = ()
    caches: Sequence[KVCache] = ()

    def __init__(self, shortest: int, longest: int, num_speculative_tokens: int, max_model_len: int) -> None:
        self.shortest = shortest
        self.longest = longest
        self.num_speculative_tokens = num_speculative_tokens
        self.max_model_len = max_model_len

    def draft(self, step: Verified) -> list[tuple[int, ...]]:
        """See `Drafter.draft`."""
        pairs = zip(step.states, step.sampled, strict=True)
        return [self.propose(state.tokens) if tokens else () for state, tokens in pairs]

    def idle(self, agreement: Agreement) -> None:
        """There is nothing that ranks would do together."""

    def propose(self, tokens: Array) -> tuple[int, ...]:
        """At most K drafts for the sequence ``tokens`` (int64), none at or past position ``max_model_len``."""
        length = len(tokens)
        count = min(self.num_speculative_tokens, self.max_model_len - length)
        if count <= 0 or length <= self.shortest:
            return ()
        # Ends of earlier n-grams equal to the suffix, for n = 1, 2, ... The suffix itself ends at length - 1.
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])
        matched = 0
        best = ends
        for n in range(1, self.longest + 1):
            if n > 1:
                ends = ends[np.searchsorted(ends, n - 1) :]
                ends = ends[tokens[ends - (n - 1)] == tokens[length - n]] if n <= length else ends[:0]
            if not len(ends):
                break
            matched, best = n, ends
        if matched < self.shortest:
            return ()
        follow = int(best[0]) + 1
        return tuple(tokens[follow : min(follow + count, length)].tolist())
