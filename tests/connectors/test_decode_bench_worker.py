# SPDX-License-Identifier: Apache-2.0
"""DecodeBench, worker half: exactly the blocks that the scheduler half named are filled, in every layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.connectors.config import kv_transfer_config
from paceline.connectors.decode_bench.scheduler import DecodeBenchScheduler, Fill
from paceline.connectors.decode_bench.worker import DecodeBenchWorker
from paceline.core.config import CacheConfig, ConfigError, EngineConfig, GroupConfig, SchedulerConfig
from paceline.core.plan import StepResult
from paceline.core.request import Request, SamplingParams, StoredTokens
from paceline.core.scheduler import Scheduler

BLOCKS = 40


def cache(layers: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.zeros(BLOCKS, 2, 3, 16, 4).to(dtype) for _ in range(layers)]


def filled(layer: Tensor) -> set[int]:
    return {b for b in range(BLOCKS) if bool((layer[b] != 0).any())}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("local", "external"), [(0, 64), (32, 32), (48, 16)])
def test_T13_only_blocks_behind_the_local_prefix_are_filled(local: int, external: int, groups: int) -> None:
    layers = [cache() for _ in range(groups)]
    worker = DecodeBenchWorker(0.5)
    worker.register_kv_caches(layers)
    config = EngineConfig(
        scheduler=SchedulerConfig(max_model_len=300),
        cache=CacheConfig(num_blocks=BLOCKS, groups=(GroupConfig(),) * groups),
    )
    scheduler = Scheduler(config, DecodeBenchScheduler(16))

    def step() -> None:
        plan = scheduler.plan(0.0)
        if plan.load_meta is not None:
            worker.start_load_kv(plan.load_meta)
        scheduler.commit(StepResult(plan.step, [(5,) if row.samples else () for row in plan.rows]), 0.0)

    ids = list(range(local + external + 1))
    if local:
        scheduler.add(Request("earlier", StoredTokens(ids[: local + 1]), SamplingParams(max_tokens=1)))
        step()
        for layer in (layer for group in layers for layer in group):
            layer.zero_()
    request = Request("r", StoredTokens(ids), SamplingParams(max_tokens=9))
    scheduler.add(request)
    step()
    for group, table in zip(layers, request.tables, strict=True):
        for layer in group:
            assert filled(layer) == set(table[local // 16 : (local + external) // 16])
            assert set(layer[table[local // 16]].unique().tolist()) == {0.5}


def test_noise_has_the_mean_and_deviation_asked_for_and_repeats_with_its_seed() -> None:
    drawn = []
    for seed in (1, 1, 2):
        [layer] = layers = cache(1)
        worker = DecodeBenchWorker(0.25, 0.1, seed=seed)
        worker.register_kv_caches([layers])
        worker.start_load_kv([Fill(0, (tuple(range(1, 31)),), 480)])
        assert filled(layer) == set(range(1, 31))
        drawn.append(layer)
    values = drawn[0][1:31]
    assert values.mean().item() == pytest.approx(0.25, abs=0.01)
    assert values.std().item() == pytest.approx(0.1, abs=0.01)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("std", [0.0, 0.1])
def test_integer_buffers_and_recurrent_states_get_zeros(std: float) -> None:
    groups = [cache(1, torch.int8), cache(1, torch.bfloat16), cache(1)]
    for [layer] in groups:
        layer.fill_(7)
    worker = DecodeBenchWorker(0.5, std, zeroed=[2])
    worker.register_kv_caches(groups)
    worker.start_load_kv([Fill(0, ((3,), (4,), (5,)), 16)])
    (integers,), (floats,), (states,) = groups
    assert not integers[3].any()
    assert 0.3 < floats[4].float().mean().item() < 0.7
    assert not states[5].any()
    for layer, block in ((integers, 3), (floats, 4), (states, 5)):
        layer[block] = 7
        assert bool((layer == 7).all()), "no other block is touched"


def test_transfer_configuration_is_read_with_the_names_of_vllm() -> None:
    given = {
        "kv_connector": "DecodeBenchConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"fill_mean": 0.02, "fill_std": 0},
    }
    config = kv_transfer_config(given)
    assert config is not None
    assert (config.kv_load_failure_policy, config.fill.mean, config.fill.std) == ("recompute", 0.02, 0)
    assert kv_transfer_config(None) is None
    default = kv_transfer_config({"kv_connector": "DecodeBenchConnector"})
    assert default is not None
    assert (default.kv_load_failure_policy, default.fill.mean, default.fill.std) == ("fail", 0.015, 0.0)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kv_connector": "NoSuchConnector"}, "kv_connector"),
        ({"kv_connector": None}, "kv_connector"),
        ({"kv_role": "kv_producer"}, "kv_role"),
        ({"kv_buffer_device": "cuda"}, "kv_buffer_device"),
        ({"kv_load_failure_policy": "retry"}, "kv_load_failure_policy"),
        ({"kv_rank": 0}, "kv_rank"),
        ({"kv_connector_extra_config": {"fill": 1}}, "kv_connector_extra_config.fill"),
        ({"kv_connector_extra_config": {"fill_mean": "x"}}, "kv_connector_extra_config.fill_mean"),
        ({"kv_connector_extra_config": {"fill_mean": float("nan")}}, "kv_connector_extra_config.fill_mean"),
        ({"kv_connector_extra_config": {"fill_std": -0.1}}, "kv_connector_extra_config.fill_std"),
        ({"kv_connector_extra_config": [1]}, "kv_connector_extra_config"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        kv_transfer_config({"kv_connector": "DecodeBenchConnector"} | changes)
    assert refused.value.field == f"kv_transfer_config.{field}"
