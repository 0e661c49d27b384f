# SPDX-License-Identifier: Apache-2.0
"""The generated load: equal to vLLM's client number for number, valid or refused by name, warm-ups apart."""

from __future__ import annotations

import gzip
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.config import ConfigError
from paceline.core.workload import Job, Workload, arrival_times, generate, generate_warmups, shared_prefix

GOLDEN = Path(__file__).parent / "data" / "vllm_random_workload.json.gz"


def golden_cases() -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(GOLDEN.read_bytes()))["cases"]


def workload_of(options: dict[str, Any]) -> Workload:
    return Workload(**{k: math.inf if v == "inf" else v for k, v in options.items()})


@pytest.mark.parametrize("case", golden_cases(), ids=lambda c: f"seed{c['options']['seed']}")
def test_equals_vllm_bench_serve(case: dict[str, Any]) -> None:
    workload = workload_of(case["options"])
    jobs = generate(workload)
    assert [j.input_len for j in jobs] == case["input_lens"]
    assert [j.output_len for j in jobs] == case["output_lens"]
    assert [j.offset for j in jobs] == case["offsets"]
    assert [j.arrival_s for j in jobs] == pytest.approx(case["arrivals_s"], rel=1e-12)
    if case["prompts"] is not None:
        prompts = [list(j.source(workload.vocab_size).tokens(0, j.prompt_len)) for j in jobs]
        assert prompts == case["prompts"]


def test_last_arrival_is_at_n_over_rate_and_order_is_kept() -> None:
    for burstiness in (0.2, 1.0, 5.0, math.inf):
        times = arrival_times(Workload(num_prompts=97, request_rate=3.5, burstiness=burstiness, seed=9))
        assert times[-1] == pytest.approx(97 / 3.5)
        assert times == sorted(times)


def test_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(Workload(num_prompts=5)) == [0.0] * 5


def test_global_random_state_is_neither_read_nor_moved() -> None:
    workload = Workload(num_prompts=20, request_rate=2.0, seed=4, num_warmups=3, prefix_len=4)
    first = (generate(workload), generate_warmups(workload))
    np.random.seed(1)
    random.seed(1)
    before = (np.random.get_state()[1].tolist(), random.getstate())  # type: ignore[union-attr]
    assert (generate(workload), generate_warmups(workload)) == first
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before  # type: ignore[union-attr]


def test_separate_range_ratios() -> None:
    workload = Workload(input_len=100, output_len=10, range_ratio=0.5, output_range_ratio=0.0, num_prompts=300)
    jobs = generate(workload)
    assert {j.output_len for j in jobs} == {10}
    assert min(j.input_len for j in jobs) >= 50
    assert max(j.input_len for j in jobs) <= 150
    assert workload.input_bounds == (50, 150)
    assert workload.longest == 160


def test_output_is_never_empty() -> None:
    assert min(j.output_len for j in generate(Workload(output_len=1, range_ratio=0.99, num_prompts=200))) == 1


def block_keys(job: Job, workload: Workload, block_size: int) -> list[bytes]:
    source = job.source(workload.vocab_size)
    return [source.block_key(i, block_size) for i in range(source.length // block_size)]


@pytest.mark.parametrize("prefix_len", [0, 7, 16, 37])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_block_keys_are_equal_exactly_where_the_ids_are(prefix_len: int, block_size: int) -> None:
    workload = Workload(input_len=40, range_ratio=0.5, prefix_len=prefix_len, vocab_size=23, num_prompts=60)
    by_ids: dict[tuple[int, ...], bytes] = {}
    for job in generate(workload):
        source = job.source(workload.vocab_size)
        for i, key in enumerate(block_keys(job, workload, block_size)):
            ids = (i, *source.tokens(i * block_size, (i + 1) * block_size))
            assert by_ids.setdefault(ids, key) == key
    assert len({(ids[0], key) for ids, key in by_ids.items()}) == len(by_ids)


def test_slices_of_a_prefixed_prompt_join_up() -> None:
    workload = Workload(input_len=10, prefix_len=5, vocab_size=50, num_prompts=1)
    job = generate(workload)[0]
    source = job.source(50)
    whole = list(source.tokens(0, source.length))
    assert len(whole) == source.length == job.prompt_len == 15
    assert tuple(whole[:5]) == shared_prefix(workload)
    for cut in range(16):
        assert list(source.tokens(0, cut)) + list(source.tokens(cut, 99)) == whole


@pytest.mark.parametrize("prefix_len", [0, 3, 20])
def test_warmups_are_repeatable_and_share_no_content_with_the_measured(prefix_len: int) -> None:
    workload = Workload(
        input_len=30, range_ratio=0.3, prefix_len=prefix_len, vocab_size=11, num_prompts=200, num_warmups=24, seed=5
    )
    warmups = generate_warmups(workload)
    assert warmups == generate_warmups(workload)
    assert len(warmups) == 24
    assert {w.arrival_s for w in warmups} == {0.0}
    low, high = workload.input_bounds
    assert all(prefix_len + low <= w.prompt_len <= prefix_len + high for w in warmups)
    measured = {tuple(j.source(11).tokens(0, 2)) for j in generate(workload)}
    assert not measured & {tuple(w.source(11).tokens(0, 2)) for w in warmups}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dataset", "sharegpt"),
        ("input_len", -1),
        ("input_len", 0),
        ("output_len", 0),
        ("range_ratio", 1.0),
        ("range_ratio", -0.1),
        ("output_range_ratio", 1.5),
        ("prefix_len", -1),
        ("vocab_size", 1),
        ("num_prompts", 0),
        ("num_warmups", -2),
        ("request_rate", 0),
        ("request_rate", math.nan),
        ("burstiness", 0.0),
        ("max_concurrency", 0),
        ("seed", -1),
        ("seed", 2**32),
        ("ignore_eos", "yes"),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as error:
        Workload(**{field: value})  # type: ignore[arg-type]
    assert error.value.field == f"workload.{field}"
