# SPDX-License-Identifier: Apache-2.0
"""The verifier's width: who is padded to 1 + K tokens, and how much of what was drafted is accepted."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.config import PadResumed, SpeculationConfig
from paceline.core.plan import PLACEHOLDER


def pads_on_leaving_queue(mode: PadResumed, *, running_in_step: bool, resolved: int) -> bool:
    """The padding rule for a request that leaves the waiting queue with one token left to compute.

    ``resolved`` is the number of tokens found computed by the prefix cache and the connector *in this pass*; the
    request's own field is written only at admission, which is why asking the field missed every request that
    a synchronous connector resolved while its rank was idle (vLLM pull request 55126). ``running`` is the rule
    before that change.
    """
    if mode == "off":
        return False
    return running_in_step or (mode == "resumed" and resolved > 0)


def width_fits(computed: int, width: int, max_model_len: int) -> bool:
    """Whether a row of ``width`` tokens leaves room for the token that it samples."""
    return computed + width + 1 <= max_model_len


def pad(drafts: tuple[int, ...], num_speculative_tokens: int) -> tuple[int, ...]:
    """``drafts`` filled up to K with placeholders, which are always rejected and never counted."""
    return drafts + (PLACEHOLDER,) * (num_speculative_tokens - len(drafts))


def rates_of_length(length: float, num_speculative_tokens: int) -> tuple[float, ...]:
    """Acceptance rates r_i = P(the first i + 1 drafts are accepted) whose mean acceptance length is ``length``."""
    whole = int(length - 1)
    part = length - 1 - whole
    rates = [1.0] * whole + [part] + [0.0] * num_speculative_tokens
    return tuple(rates[:num_speculative_tokens])


def acceptance_rates(config: SpeculationConfig) -> tuple[float, ...]:
    """The synthetic rates r_i of a configuration, given directly or as a mean length."""
    if config.synthetic_acceptance_rates is not None:
        return config.synthetic_acceptance_rates
    if config.synthetic_acceptance_length is None:
        raise ValueError("synthetic acceptance rates belong to rejection_sample_method: synthetic")
    return rates_of_length(config.synthetic_acceptance_length, config.num_speculative_tokens)


def conditional_rates(config: SpeculationConfig) -> tuple[float, ...]:
    """c_i = r_i / r_(i-1): the probability that draft i is accepted once all before it are (0 after a 0)."""
    rates = acceptance_rates(config)
    previous = (1.0, *rates[:-1])
    return tuple(r / p if p > 0 else 0.0 for r, p in zip(rates, previous, strict=True))


class AcceptanceStats:
    """Counts of verified drafts; placeholders are in none of them.

    ``accepted_lengths[a]``: verifications in which exactly a drafts were accepted.
    """

    __slots__ = ("accepted_lengths", "num_draft_tokens")

    def __init__(self, num_speculative_tokens: int) -> None:
        self.accepted_lengths = [0] * (num_speculative_tokens + 1)
        self.num_draft_tokens = 0

    @property
    def num_drafts(self) -> int:
        """Rows that carried at least one draft."""
        return sum(self.accepted_lengths)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(a * n for a, n in enumerate(self.accepted_lengths))

    @property
    def num_accepted_tokens_per_pos(self) -> list[int]:
        """How often the draft at each position was accepted (length K)."""
        return [sum(self.accepted_lengths[p + 1 :]) for p in range(len(self.accepted_lengths) - 1)]

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per verification, the model's own included; 1.0 before any verification."""
        drafts = self.num_drafts
        return 1.0 + self.num_accepted_tokens / drafts if drafts else 1.0

    def add(self, other: AcceptanceStats) -> None:
        """Add another rank's counts (of the same K)."""
        self.num_draft_tokens += other.num_draft_tokens
        self.accepted_lengths = [a + b for a, b in zip(self.accepted_lengths, other.accepted_lengths, strict=True)]


def real_drafts(drafts: Sequence[int]) -> int:
    """Drafts that are not placeholders (these come last)."""
    return len(drafts) - drafts.count(PLACEHOLDER)
