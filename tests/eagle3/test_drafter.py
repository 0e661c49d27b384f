# SPDX-License-Identifier: Apache-2.0
"""Drafting by a head: no greedy token changes, and what is drafted through a cache is what is drafted without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paceline.connectors.decode_bench.worker import DecodeBenchWorker
from paceline.core.config import ConfigError, EngineConfig, SchedulerConfig, SpeculationConfig
from paceline.core.plan import PLACEHOLDER
from paceline.core.request import Request, SamplingParams, StoredTokens
from paceline.execution.runner import ModelExecutor
from paceline.models.eagle3 import Eagle3
from paceline.models.llama import Llama
from tests.eagle3.heads import LAYERS, PROMPTS, SHARED, Engine, K, Reference

NEAR_TIE = 1e-4

SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 9},
    {"max_num_batched_tokens": 40, "long_prefill_token_threshold": 7},
    {"max_num_seqs": 2},
    {"cache": {"block_size": 5}},
    {"cache": {"enable_prefix_caching": False}},
    {"max_model_len": 60, "cache": {"num_blocks": 20}},
    {"max_model_len": 60, "cache": {"num_blocks": 20, "enable_prefix_caching": False}},
    {"speculation": {"pad_resumed": "running"}},
    {"speculation": {"pad_resumed": "off"}},
    {"speculation": {"num_speculative_tokens": 1}},
    {"speculation": {"disable_eagle_block_drop": True}},
]


def check_drafts(engine: Engine, reference: Reference) -> int:
    """Compare all that was drafted with the reference, up to near-ties of its logits; how many drafts agreed."""
    limit, count = engine.config.scheduler.max_model_len, engine.config.speculation.num_speculative_tokens
    agreed = 0
    for tokens, drafts in engine.executor.drafted:
        assert len(drafts) == min(count, limit - len(tokens))
        for (expected, gap), draft in zip(reference.drafts(tokens), drafts, strict=False):
            if gap < NEAR_TIE:
                break
            assert draft == expected, (tokens, drafts)
            agreed += 1
    return agreed


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_greedy_tokens_are_unchanged_and_drafts_are_those_without_a_cache(
    target: Llama, head: Eagle3, reference: Reference, settings: dict[str, Any]
) -> None:
    prompts = [*PROMPTS, *SHARED, PROMPTS[0]]
    max_tokens = 11 if "max_model_len" in settings else 20
    expected = Engine(target, None).complete(prompts, max_tokens=max_tokens)
    engine = Engine(target, head, **settings)
    for _ in range(2):
        assert engine.complete(prompts, max_tokens=max_tokens) == expected
    if not settings.get("speculation", {}).get("disable_eagle_block_drop"):
        assert check_drafts(engine, reference) > 200
    if settings.get("cache", {}).get("num_blocks"):
        assert engine.scheduler.stats.preemptions > 0
    elif settings.get("cache", {}).get("enable_prefix_caching", True):
        assert engine.scheduler.stats.prefix_hits > 0


@pytest.mark.parametrize("length", range(1, 8))
def test_drafting_stops_where_the_context_ends(target: Llama, head: Eagle3, reference: Reference, length: int) -> None:
    prompt = PROMPTS[0][: 20 - length]
    engine = Engine(target, head, max_model_len=24)
    [output] = engine.complete([prompt], max_tokens=50)
    assert output == Engine(target, None, max_model_len=24).complete([prompt], max_tokens=50)[0]
    assert len(prompt) + len(output) == 24
    assert check_drafts(engine, reference) > 0


def test_sampled_requests_repeat_by_seed(target: Llama, head: Eagle3) -> None:
    first, again, other = (
        Engine(target, head).complete(PROMPTS, temperature=1.0, seed=seed, top_p=0.9) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_acceptance_at_given_rates(target: Llama, head: Eagle3) -> None:
    """The mean over some 3,000 verifications, whose standard error is 0.8% of it."""
    rates = (0.7, 0.49, 0.3382)
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    engine = Engine(target, head, speculation=synthetic, max_model_len=256, cache={"num_blocks": 1000})
    engine.complete([[i + 1, 2 * i + 1, 7] for i in range(32)], max_tokens=240, ignore_eos=True)
    acceptance = engine.scheduler.stats.acceptance
    assert acceptance.num_drafts > 2900
    assert acceptance.acceptance_length == pytest.approx(1 + sum(rates), rel=0.02)


def test_a_failed_row_leaves_the_others_their_drafts(
    target: Llama, head: Eagle3, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Engine(target, None).complete(PROMPTS[:2])
    said = {token for tokens in [*expected, *PROMPTS[:2]] for token in tokens}
    poison = next(i for i, drafted in enumerate(reference.w["t2d"].tolist()) if not drafted and i not in said)
    embedding = target.embedding.clone()
    embedding[poison] = float("nan")
    monkeypatch.setattr(target, "embedding", embedding)
    engine = Engine(target, head)
    engine.begin_beside_a_failure(PROMPTS[1], poison)
    assert engine.complete(PROMPTS[:2]) == expected
    assert engine.outputs["good"] == expected[1]
    assert check_drafts(engine, reference) > 30


def test_made_up_kv_is_made_up_for_the_head_too(target: Llama, head: Eagle3) -> None:
    """A prompt of 48 tokens in blocks of 4, filled up to its last: 11 blocks stay whole when that one is computed."""

    class Worker(DecodeBenchWorker):
        layers: Sequence[torch.Tensor] = ()

        def register_kv_caches(self, caches: Sequence[Sequence[torch.Tensor]]) -> None:
            super().register_kv_caches(caches)
            [self.layers] = caches

    worker = Worker(mean=0.5)
    engine = Engine(target, head, worker=worker)
    engine.rank.add(Request("0", StoredTokens(PROMPTS[2]), SamplingParams(temperature=0.0, max_tokens=20)))
    engine.rank.begin(0.0)
    assert [(row.n, row.drafts) for row in engine.rank.plan.rows] == [(1 + K, (PLACEHOLDER,) * K)]
    engine.rank.launch()
    engine.rank.finish(engine.rank.collect(), 0.0)
    assert len(worker.layers) == LAYERS + 1
    assert [int((layer == 0.5).flatten(1).all(1).sum()) for layer in worker.layers] == [11] * (LAYERS + 1)
    [(tokens, drafts)] = engine.executor.drafted
    assert (len(tokens), len(drafts)) == (49, K)
    while engine.rank.has_work:
        engine.rank.step(0.0)
    assert engine.scheduler.stats.acceptance.num_draft_tokens > 0


def test_heads_of_another_target_are_refused(target: Llama, head: Eagle3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "target_hidden_size", 64)
    with pytest.raises(ConfigError, match=r"speculation\.model: its target has hidden states of 64 numbers"):
        Engine(target, head)
    monkeypatch.undo()
    monkeypatch.setattr(head, "taps", (2, 4, 9))
    with pytest.raises(ConfigError, match=r"speculation\.model: .*layers \[2, 4, 9\].*, and the model has 8 layers"):
        Engine(target, head)
    config = EngineConfig(
        scheduler=SchedulerConfig(max_model_len=128),
        speculation=SpeculationConfig(method="eagle3", model="x", num_speculative_tokens=K),
    )
    for wrong in (None, target):
        with pytest.raises(ConfigError, match=r"speculation\.model: method 'eagle3' needs"):
            ModelExecutor(target, config, draft=wrong)
