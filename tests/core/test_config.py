# SPDX-License-Identifier: Apache-2.0
"""The configuration is checked once, as a whole, and every error names its field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.config import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    GraphConfig,
    GroupConfig,
    SchedulerConfig,
    SpeculationConfig,
)

from .driving import engine_config

NAN = float("nan")
WRONG: list[tuple[type, dict[str, Any], str]] = [
    (SchedulerConfig, {"max_num_seqs": 0}, "scheduler.max_num_seqs"),
    (SchedulerConfig, {"max_num_seqs": True}, "scheduler.max_num_seqs"),
    (SchedulerConfig, {"max_num_seqs": "8"}, "scheduler.max_num_seqs"),
    (SchedulerConfig, {"max_num_batched_tokens": 0}, "scheduler.max_num_batched_tokens"),
    (SchedulerConfig, {"max_num_batched_tokens": 1.5}, "scheduler.max_num_batched_tokens"),
    (SchedulerConfig, {"max_model_len": 1}, "scheduler.max_model_len"),
    (SchedulerConfig, {"long_prefill_token_threshold": -1}, "scheduler.long_prefill_token_threshold"),
    (SchedulerConfig, {"policy": "lifo"}, "scheduler.policy"),
    (SchedulerConfig, {"later_deadline_s": 0.0}, "scheduler.later_deadline_s"),
    (SchedulerConfig, {"later_deadline_s": NAN}, "scheduler.later_deadline_s"),
    (SchedulerConfig, {"transfer_deadline_s": -1.0}, "scheduler.transfer_deadline_s"),
    (SchedulerConfig, {"load_failure_policy": "retry"}, "scheduler.load_failure_policy"),
    (CacheConfig, {"block_size": 0}, "cache.block_size"),
    (CacheConfig, {"num_blocks": 1}, "cache.num_blocks"),
    (CacheConfig, {"enable_prefix_caching": "yes"}, "cache.enable_prefix_caching"),
    (CacheConfig, {"groups": ()}, "cache.groups"),
    (GroupConfig, {"kind": "local"}, "cache.groups.kind"),
    (GroupConfig, {"kind": "sliding"}, "cache.groups.sliding_window"),
    (GroupConfig, {"kind": "full", "sliding_window": 8}, "cache.groups.sliding_window"),
    (GroupConfig, {"kind": "recurrent", "sliding_window": 8}, "cache.groups.sliding_window"),
    (GraphConfig, {"mode": "PIECEWISE"}, "graphs.mode"),
    (GraphConfig, {"capture_sizes": (4, 0)}, "graphs.capture_sizes"),
]


@pytest.mark.parametrize(("kind", "fields", "name"), WRONG)
def test_a_value_that_cannot_be_honoured_is_refused_with_its_name(
    kind: type, fields: dict[str, Any], name: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        kind(**fields)
    assert refused.value.field == name
    assert str(refused.value) == f"{name}: {refused.value.problem}"


SYNTHETIC = {"method": "eagle3", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}
WRONG_SPECULATION: list[tuple[dict[str, Any], str]] = [
    ({"num_speculative_tokens": 2}, "method"),
    ({"method": "medusa", "num_speculative_tokens": 2}, "method"),
    ({"method": "ngram"}, "num_speculative_tokens"),
    ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
    ({"pad_resumed": "always"}, "pad_resumed"),
    ({"pad_resumed": True}, "pad_resumed"),
    ({"rejection_sample_method": "typical"}, "rejection_sample_method"),
    ({"synthetic_acceptance_length": 2.0}, "synthetic_acceptance_length"),
    ({"synthetic_acceptance_rates": (0.5,)}, "synthetic_acceptance_rates"),
    (SYNTHETIC, "synthetic_acceptance_rates"),
    ({**SYNTHETIC, "synthetic_acceptance_rates": (0.5,)}, "synthetic_acceptance_rates"),
    ({**SYNTHETIC, "synthetic_acceptance_rates": (0.5, 0.6, 0.1)}, "synthetic_acceptance_rates"),
    ({**SYNTHETIC, "synthetic_acceptance_rates": (1.5, 0.6, 0.1)}, "synthetic_acceptance_rates"),
    ({**SYNTHETIC, "synthetic_acceptance_rates": (NAN, 0.6, 0.1)}, "synthetic_acceptance_rates"),
    (
        {**SYNTHETIC, "synthetic_acceptance_rates": (0.5, 0.2, 0.1), "synthetic_acceptance_length": 2.0},
        "synthetic_acceptance_rates",
    ),
    ({**SYNTHETIC, "synthetic_acceptance_length": 0.5}, "synthetic_acceptance_length"),
    ({**SYNTHETIC, "synthetic_acceptance_length": 4.5}, "synthetic_acceptance_length"),
    ({"prompt_lookup_min": 0}, "prompt_lookup_min"),
    ({"prompt_lookup_min": 6}, "prompt_lookup_max"),
    ({"lookahead": -1}, "lookahead"),
    ({"draft_slots": -1}, "draft_slots"),
]


@pytest.mark.parametrize(("fields", "name"), WRONG_SPECULATION)
def test_speculation_that_contradicts_itself_is_refused_with_its_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        SpeculationConfig(**fields)
    assert refused.value.field == f"speculation.{name}"


@pytest.mark.parametrize(
    ("method", "lookahead", "slots"),
    [("ngram", 0, 0), ("eagle3", 3, 0), ("mtp", 3, 0), ("draft_model", 3, 1)],
)
def test_what_a_drafter_costs(method: Any, lookahead: int, slots: int) -> None:
    spec = SpeculationConfig(method=method, num_speculative_tokens=3)
    assert (spec.width, spec.lookahead_tokens, spec.slots_per_row) == (4, lookahead, slots)
    given_ = SpeculationConfig(method=method, num_speculative_tokens=3, lookahead=9, draft_slots=2)
    assert (given_.lookahead_tokens, given_.slots_per_row) == (9, 2)


def test_without_speculation_a_row_is_one_token() -> None:
    spec = SpeculationConfig()
    assert (spec.width, spec.lookahead_tokens, spec.slots_per_row) == (1, 0, 0)


@pytest.mark.parametrize("field", ["lookahead", "draft_slots"])
def test_what_a_drafter_needs_is_refused_without_a_drafter(field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        SpeculationConfig(**{field: 1})  # type: ignore[arg-type]
    assert refused.value.field == f"speculation.{field}"


@given(
    K=st.integers(0, 6), lookahead=st.integers(0, 8), bs=st.sampled_from([1, 8, 16]), mml=st.integers(17, 100),
    groups=st.integers(1, 3),
)  # fmt: skip
def test_the_pool_must_hold_the_longest_request_in_every_group(
    K: int, lookahead: int, bs: int, mml: int, groups: int
) -> None:
    lookahead = lookahead if K else 0
    tokens = mml + 1 + K + lookahead
    least = 1 + groups * -(-tokens // bs)
    settings: dict[str, Any] = {
        "K": K, "lookahead": lookahead, "block_size": bs, "mml": mml, "groups": (GroupConfig(),) * groups
    }  # fmt: skip
    assert engine_config(num_blocks=least, **settings).cache.num_blocks >= least
    with pytest.raises(ConfigError, match=f"cache.num_blocks: .*at least {least} blocks"):
        engine_config(num_blocks=least - 1, **settings)


@pytest.mark.parametrize("group", [(GroupConfig(kind="recurrent"),), (GroupConfig(), GroupConfig(kind="recurrent"))])
@pytest.mark.parametrize(("field", "value"), [("max_num_batched_tokens", 15), ("long_prefill_token_threshold", 8)])
def test_a_recurrent_group_needs_chunks_of_a_block_at_least(
    field: str, value: int, group: tuple[GroupConfig, ...]
) -> None:
    """Chunk ends fall on block boundaries: with less than a block a step a prompt would never start."""
    scheduler = SchedulerConfig(max_model_len=100, max_num_seqs=2, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as refused:
        EngineConfig(scheduler=scheduler, cache=CacheConfig(num_blocks=100, block_size=16, groups=group))
    assert refused.value.field == f"scheduler.{field}"


def test_an_empty_capture_list_is_refused_not_ignored() -> None:
    with pytest.raises(ConfigError) as refused:
        GraphConfig(capture_sizes=())
    assert refused.value.field == "graphs.capture_sizes"


@pytest.mark.parametrize(("budget", "warned"), [(32, False), (31, True), (4, True)])
def test_a_budget_that_does_not_hold_every_running_request_is_warned_of(budget: int, warned: bool) -> None:
    warnings = engine_config(K=3, seqs=8, budget=budget).warnings()
    assert len(warnings) == warned
    if warned:
        assert "scheduler.max_num_batched_tokens" in warnings[0]
        assert "32" in warnings[0]


def test_draft_slots_count_in_the_warning() -> None:
    assert engine_config(K=3, method="draft_model", seqs=8, budget=39).warnings()
    assert not engine_config(K=3, method="draft_model", seqs=8, budget=40).warnings()
