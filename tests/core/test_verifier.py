# SPDX-License-Identifier: Apache-2.0
"""The verifier: the padding rule as a function, synthetic acceptance rates, and what is counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.config import SpeculationConfig
from paceline.core.plan import PLACEHOLDER
from paceline.core.verifier import (
    AcceptanceStats,
    acceptance_rates,
    conditional_rates,
    pad,
    pads_on_leaving_queue,
    rates_of_length,
    real_drafts,
    width_fits,
)


@pytest.mark.parametrize("resolved", [0, 1, 32, 100_000])
@pytest.mark.parametrize("beside", [False, True])
def test_the_padding_rule(beside: bool, resolved: int) -> None:
    def pads(mode: str) -> bool:
        return pads_on_leaving_queue(mode, running_in_step=beside, resolved=resolved)  # type: ignore[arg-type]

    assert not pads("off")
    assert pads("running") == beside
    assert pads("resumed") == (beside or resolved > 0)


@pytest.mark.parametrize(("computed", "width", "mml", "fits"), [(32, 4, 37, True), (32, 4, 36, False), (0, 1, 2, True)])
def test_a_row_leaves_room_for_the_token_that_it_samples(computed: int, width: int, mml: int, fits: bool) -> None:
    assert width_fits(computed, width, mml) == fits


@given(st.lists(st.integers(0, 99), max_size=6).map(tuple), st.integers(0, 6))
def test_padding_fills_up_behind_the_real_drafts(drafts: tuple[int, ...], more: int) -> None:
    padded = pad(drafts, len(drafts) + more)
    assert padded == drafts + (PLACEHOLDER,) * more
    assert real_drafts(padded) == len(drafts)


@given(st.integers(1, 8), st.data())
def test_rates_of_a_mean_length_have_that_mean(K: int, data: st.DataObject) -> None:
    length = data.draw(st.floats(1, K + 1))
    rates = rates_of_length(length, K)
    assert len(rates) == K
    assert all(0 <= b <= a <= 1 for a, b in zip((1.0, *rates), rates, strict=False))
    assert 1 + sum(rates) == pytest.approx(length)


def test_a_mean_length_is_spent_from_the_first_draft_on() -> None:
    assert rates_of_length(2.5, 3) == (1.0, 0.5, 0.0)
    assert rates_of_length(1.0, 2) == (0.0, 0.0)
    assert rates_of_length(4.0, 3) == (1.0, 1.0, 1.0)


def speculation(**more: object) -> SpeculationConfig:
    return SpeculationConfig(method="mtp", rejection_sample_method="synthetic", **more)  # type: ignore[arg-type]


def test_conditional_rates_multiply_back_to_the_given_ones() -> None:
    config = speculation(num_speculative_tokens=3, synthetic_acceptance_rates=(0.7, 0.49, 0.3382))
    assert acceptance_rates(config) == (0.7, 0.49, 0.3382)
    assert conditional_rates(config) == pytest.approx((0.7, 0.7, 0.3382 / 0.49))
    nothing = speculation(num_speculative_tokens=3, synthetic_acceptance_rates=(0.5, 0.0, 0.0))
    assert conditional_rates(nothing) == (0.5, 0.0, 0.0), "no division by a rate of 0"
    assert acceptance_rates(speculation(num_speculative_tokens=2, synthetic_acceptance_length=2.25)) == (1.0, 0.25)


def test_standard_verification_has_no_synthetic_rates() -> None:
    with pytest.raises(ValueError, match="rejection_sample_method: synthetic"):
        acceptance_rates(SpeculationConfig(method="mtp", num_speculative_tokens=2))


def test_acceptance_by_length_and_by_position() -> None:
    stats = AcceptanceStats(3)
    assert (stats.acceptance_length, stats.num_drafts) == (1.0, 0)
    stats.accepted_lengths = [4, 3, 2, 1]
    stats.num_draft_tokens = 30
    assert stats.num_drafts == 10
    assert stats.num_accepted_tokens == 3 + 4 + 3
    assert stats.num_accepted_tokens_per_pos == [6, 3, 1]
    assert stats.acceptance_length == 2.0
    other = AcceptanceStats(3)
    other.accepted_lengths, other.num_draft_tokens = [0, 0, 0, 5], 15
    stats.add(other)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.accepted_lengths) == (15, 45, [4, 3, 2, 6])
