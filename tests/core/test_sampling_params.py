# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters: defaults ask for nothing, ranges are checked by name; log-probabilities follow the tokens."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from paceline.core.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from paceline.core.plan import InvalidResult, StepResult, TokenLogprobs
from paceline.core.request import Request, SamplingParams, StoredTokens
from paceline.core.scheduler import Scheduler

NAN = float("nan")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", NAN),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("presence_penalty", NAN),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {3: NAN}),
        ("logprobs", -2),
        ("logprobs", True),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        SamplingParams(**{field: value})


def test_the_ends_of_the_ranges_are_taken_and_survive_the_wire() -> None:
    params = SamplingParams(
        top_p=1e-6,
        top_k=-1,
        min_p=1.0,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=1e-3,
        min_tokens=16,
        logit_bias={0: -100.0, 70000: 100.0},
        logprobs=-1,
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def scheduler(*given: SamplingParams) -> tuple[Scheduler, list[Request]]:
    """One request for each, prefilled in one step that is in flight."""
    s = Scheduler(
        EngineConfig(
            scheduler=SchedulerConfig(max_model_len=64),
            cache=CacheConfig(num_blocks=64),
            speculation=SpeculationConfig(method="ngram", num_speculative_tokens=3),
        )
    )
    requests = [Request(str(i), StoredTokens([1, 2, 3]), p, eos_token_id=9) for i, p in enumerate(given)]
    for request in requests:
        s.add(request)
    s.plan(0.0)
    return s, requests


def scored(*tokens: int) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(t, -float(t), ((t, -float(t)),), 1) for t in tokens)


@pytest.mark.parametrize(
    ("params", "kept", "reason"),
    [
        ({"max_tokens": 3}, 2, "length"),
        ({"stop_token_ids": (6,)}, 2, "stop"),
        ({"max_tokens": 5}, 4, "length"),
        ({"max_tokens": 9}, 4, None),
        ({"stop_token_ids": (6,), "min_tokens": 3}, 4, None),
        ({"stop_token_ids": (6, 7), "min_tokens": 3}, 3, "stop"),
    ],
)
def test_log_probabilities_are_cut_with_the_tokens(params: dict[str, Any], kept: int, reason: str | None) -> None:
    """Four tokens are accepted after a first one; a stop id counts only behind the first min_tokens."""
    s, _ = scheduler(SamplingParams(logprobs=1, **params), SamplingParams(max_tokens=9))
    drafts = (5, 6, 7)
    s.commit(StepResult(0, [(4,), (4,)], [drafts, drafts], [scored(4), None]), 0.0)
    s.plan(0.0)
    outputs = s.commit(StepResult(1, [(*drafts, 8), (5, 1)], [(), ()], [scored(*drafts, 8), None]), 0.0)
    by_id = {output.request_id: output for output in outputs}
    assert by_id["0"].token_ids == (5, 6, 7, 8)[:kept]
    assert by_id["0"].logprobs == scored(5, 6, 7, 8)[:kept]
    assert by_id["0"].finish_reason == reason
    assert by_id["1"].logprobs is None


def test_log_probabilities_of_other_tokens_are_refused() -> None:
    s, _ = scheduler(SamplingParams(logprobs=1))
    for wrong in ([], [scored(5)], [scored(4, 5)], [scored(4), None]):
        with pytest.raises(InvalidResult, match="log-probabilities"):
            s.commit(StepResult(0, [(4,)], [()], wrong), 0.0)
    [output] = s.commit(StepResult(0, [(4,)], [()], [scored(4)]), 0.0)
    assert output.logprobs == scored(4)
