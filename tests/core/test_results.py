# SPDX-License-Identifier: Apache-2.0
"""Latency terms and the result file: recomputed from a run that vLLM's client measured, and small cases by hand."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from paceline.core.config import ConfigError
from paceline.core.results import Latency, RequestRecord, SpeculationCounts, result_json, summarise

REFERENCE = Path(__file__).parent / "data" / "vllm_result_detailed.json"
CLIENT_ONLY = {"rtfx", "hw"}
"""Keys of the reference that no record decides: audio, and a label of the command line."""


def reference() -> dict[str, Any]:
    return json.loads(REFERENCE.read_text())


def reference_records() -> list[RequestRecord]:
    d = reference()
    return [
        RequestRecord(
            prompt_len=d["input_lens"][i],
            intended_s=d["start_times"][i] - d["queue_times"][i],
            sent_s=d["start_times"][i],
            chunk_s=list(itertools.accumulate([d["start_times"][i] + d["ttfts"][i], *d["itls"][i]])),
            output_tokens=d["output_lens"][i],
            text=d["generated_texts"][i],
        )
        for i in range(d["num_prompts"])
    ]


def test_statistics_equal_those_of_vllms_result_file() -> None:
    want, records = reference(), reference_records()
    summary = summarise(
        records,
        want["duration"],
        percentiles=(50, 90, 99, 99.9),
        max_concurrency=want["max_concurrency"],
        request_rate=want["request_rate"],
        goodput_slo_ms={"ttft": 1e9},
    )
    got = result_json(summary, records)
    measured_keys = [k for k in want if k not in CLIENT_ONLY]
    assert list(got) == measured_keys[measured_keys.index("duration") :]
    for key, value in got.items():
        if key in ("generated_texts", "errors"):
            assert value == want[key]
        elif key == "itls":
            assert [g for gaps in value for g in gaps] == pytest.approx([g for gaps in want[key] for g in gaps])
        else:
            assert value == pytest.approx(want[key], rel=1e-9), key


def test_itl_is_per_chunk_and_tpot_per_token() -> None:
    record = RequestRecord(
        prompt_len=5, intended_s=0.0, sent_s=1.0, chunk_s=[1.5, 1.53], output_tokens=6, chunk_tokens=[3, 3]
    )
    summary = summarise([record], 2.0)
    assert summary.ttft.p(50) == pytest.approx(500.0)
    assert summary.itl.p(99) == pytest.approx(30.0)
    assert summary.tpot.p(50) == pytest.approx(6.0)
    assert summary.e2el.mean_ms == pytest.approx(530.0)
    assert summary.max_output_tokens_per_s == 6
    assert summary.total_output_tokens == 6


def test_failures_count_and_leave_the_latencies_alone() -> None:
    good = RequestRecord(prompt_len=3, intended_s=0, sent_s=0, chunk_s=[0.2], output_tokens=1)
    broken = RequestRecord(prompt_len=9, intended_s=0, sent_s=0, chunk_s=[9.0, 99.0], output_tokens=2, error="died")
    empty = RequestRecord(prompt_len=9, intended_s=0, sent_s=0)
    summary = summarise([good, broken, empty], 1.0)
    assert (summary.completed, summary.failed) == (1, 2)
    assert summary.e2el.p(99.9) == pytest.approx(200.0)
    assert summary.total_input_tokens == 3
    got = result_json(summary, [good, broken, empty])
    assert got["errors"] == ["", "died", ""]
    assert got["output_lens"] == [1, 0, 0]


def test_one_token_has_no_tpot_and_does_not_drag_the_mean() -> None:
    one = RequestRecord(prompt_len=1, intended_s=0, sent_s=0, chunk_s=[1.0], output_tokens=1)
    two = RequestRecord(prompt_len=1, intended_s=0, sent_s=0, chunk_s=[1.0, 1.5], output_tokens=2)
    assert summarise([one, two], 2.0).tpot.mean_ms == pytest.approx(500.0)


def test_nothing_completed_gives_zeros_and_valid_json() -> None:
    got = result_json(summarise([], 0.0))
    assert got["completed"] == 0
    assert got["p99_itl_ms"] == 0.0
    json.dumps(got, allow_nan=False)


def test_queue_time_is_apart_from_latency() -> None:
    record = RequestRecord(prompt_len=1, intended_s=1.0, sent_s=3.0, chunk_s=[4.0], output_tokens=1)
    bounded = summarise([record], 5.0, max_concurrency=1, request_rate=2.0)
    assert bounded.ttft.mean_ms == pytest.approx(1000.0)
    assert bounded.queue is not None
    assert bounded.queue.mean_ms == pytest.approx(2000.0)
    assert bounded.e2el_with_queue is not None
    assert bounded.e2el_with_queue.mean_ms == pytest.approx(3000.0)
    assert summarise([record], 5.0).queue is None
    assert summarise([record], 5.0, max_concurrency=1, request_rate=math.inf).e2el_with_queue is None


def test_goodput_counts_requests_within_every_limit() -> None:
    def record(ttft: float, tpot: float) -> RequestRecord:
        return RequestRecord(prompt_len=1, intended_s=0, sent_s=0, chunk_s=[ttft, ttft + tpot], output_tokens=2)

    records = [record(0.1, 0.01), record(0.1, 0.05), record(0.9, 0.01)]
    summary = summarise(records, 2.0, goodput_slo_ms={"ttft": 500.0, "tpot": 20.0})
    assert result_json(summary)["request_goodput"] == pytest.approx(0.5)
    with pytest.raises(ConfigError, match=r"goodput\.itl"):
        summarise(records, 2.0, goodput_slo_ms={"itl": 1.0})


def test_acceptance() -> None:
    got = SpeculationCounts(100, 300, 153, (70, 49, 34)).to_json()
    assert got["spec_decode_acceptance_length"] == pytest.approx(2.53)
    assert got["spec_decode_acceptance_rate"] == pytest.approx(51.0)
    assert got["spec_decode_per_position_acceptance_rates"] == [0.70, 0.49, 0.34]
    assert SpeculationCounts(0, 0, 0).acceptance_length == 1.0


def test_percentiles_interpolate_and_are_named_as_in_the_file() -> None:
    latency = Latency.of([0.0, 0.001], (50.0, 99.5))
    assert latency.to_json("itl") == {
        "mean_itl_ms": 0.5,
        "median_itl_ms": 0.5,
        "std_itl_ms": 0.5,
        "p50_itl_ms": 0.5,
        "p99.5_itl_ms": pytest.approx(0.995),
    }
