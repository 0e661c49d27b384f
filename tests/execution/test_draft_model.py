# SPDX-License-Identifier: Apache-2.0
"""Drafting by a model: it changes no greedy token, and its KV stays in step with the target's.

A drafter that is the target itself says the target's own tokens as long as its KV is right: every draft is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.core.config import CacheConfig, ConfigError, EngineConfig, SchedulerConfig, SpeculationConfig
from paceline.core.graphs import FULL, NONE
from paceline.core.lockstep import RUN, Agreement
from paceline.core.plan import StepPlan
from paceline.core.request import Request, SamplingParams, StoredTokens
from paceline.core.scheduler import Scheduler
from paceline.engine.rank import Rank
from paceline.execution.runner import ModelExecutor
from paceline.models.experts import LocalExchange, Placement, Routed
from paceline.models.llama import Llama
from paceline.models.spec import ExpertConfig

MakeModel = Callable[..., Llama]
K = 3
PROMPTS = [
    [(a * i * i + b * i + 3) % 64 for i in range(n)] for a, b, n in [(5, 1, 30), (3, 2, 11), (7, 5, 48), (1, 1, 1)]
]
SHARED = [[*PROMPTS[2], 5], [*PROMPTS[2][:33], 9, 9], [*PROMPTS[2][:32], 7]]
"""Beginnings that are found in the prefix cache, the last of them all but one token."""


class Engine:
    """A scheduler and an executor; ``draft`` None: without speculation."""

    def __init__(
        self,
        target: Llama,
        draft: Llama | None,
        *,
        cache: dict[str, Any] | None = None,
        speculation: dict[str, Any] | None = None,
        **scheduler: Any,
    ) -> None:
        spec = {"method": "draft_model", "model": "draft", "num_speculative_tokens": K} | (speculation or {})
        config = EngineConfig(
            scheduler=SchedulerConfig(**({"max_model_len": 128} | scheduler)),
            cache=CacheConfig(**({"num_blocks": 200, "block_size": 4} | (cache or {}))),
            speculation=SpeculationConfig(**(spec if draft is not None else {})),
        )
        self.scheduler = Scheduler(config)
        self.rank = Rank(self.scheduler, ModelExecutor(target, config, draft=draft))
        self.added = 0

    def complete(self, prompts: Sequence[list[int]], **params: Any) -> list[list[int]]:
        """Outputs of requests that start a step apart, so that prefills meet verifier rows."""
        chosen = SamplingParams(**({"temperature": 0.0, "max_tokens": 20} | params))
        outputs: dict[str, list[int]] = {}
        waiting = list(prompts)
        while waiting or self.rank.has_work:
            if waiting:
                name = str(self.added)
                outputs[name] = []
                self.added += 1
                self.rank.add(Request(name, StoredTokens(waiting.pop(0)), chosen))
            for output in self.rank.step(0.0):
                assert output.error is None
                outputs[output.request_id] += output.token_ids
        return list(outputs.values())

    @property
    def rejected(self) -> int:
        acceptance = self.scheduler.stats.acceptance
        assert acceptance.num_accepted_tokens > 0
        return acceptance.num_draft_tokens - acceptance.num_accepted_tokens


SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 9},
    {"max_num_batched_tokens": 40, "long_prefill_token_threshold": 7},
    {"max_num_seqs": 2},
    {"cache": {"block_size": 5}},
    {"cache": {"enable_prefix_caching": False}},
    {"max_model_len": 60, "cache": {"num_blocks": 20}},
    {"speculation": {"pad_resumed": "running"}},
    {"speculation": {"num_speculative_tokens": 1}},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_greedy_tokens_are_unchanged_and_a_perfect_drafter_is_never_rejected(
    model: Llama, settings: dict[str, Any]
) -> None:
    prompts = [*PROMPTS, *SHARED, PROMPTS[0]]
    max_tokens = 11 if "max_model_len" in settings else 20
    expected = Engine(model, None).complete(prompts, max_tokens=max_tokens)
    engine = Engine(model, model, **settings)
    for _ in range(2):
        assert engine.complete(prompts, max_tokens=max_tokens) == expected
        assert engine.rejected == 0
    if settings.get("cache", {}).get("num_blocks"):
        assert engine.scheduler.stats.preemptions > 0
    elif settings.get("cache", {}).get("enable_prefix_caching", True):
        assert engine.scheduler.stats.prefix_hits > 0


@pytest.mark.parametrize("settings", SETTINGS[:4], ids=str)
def test_a_poor_drafter_changes_no_greedy_token(model: Llama, make_model: MakeModel, settings: dict[str, Any]) -> None:
    def noisy(weight: torch.Tensor) -> torch.Tensor:
        return weight + 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))

    prompts = [*PROMPTS, *SHARED]
    engine = Engine(model, make_model(lm_head=noisy, o_proj=noisy), **settings)
    assert engine.complete(prompts) == Engine(model, None).complete(prompts)
    assert engine.rejected > 0


@pytest.mark.parametrize("length", range(1, 8))
def test_drafting_stops_where_the_context_ends(model: Llama, length: int) -> None:
    prompt = PROMPTS[0][: 20 - length]
    params = {"max_tokens": 50}
    engine = Engine(model, model, max_model_len=24)
    [output] = engine.complete([prompt], **params)
    assert output == Engine(model, None, max_model_len=24).complete([prompt], **params)[0]
    assert len(prompt) + len(output) == 24
    assert engine.rejected == 0


def test_penalised_greedy_requests_are_unchanged(model: Llama) -> None:
    params = {"presence_penalty": 1.0, "repetition_penalty": 1.3, "min_tokens": 9, "stop_token_ids": (11, 30)}
    assert Engine(model, model).complete(PROMPTS, **params) == Engine(model, None).complete(PROMPTS, **params)


def test_sampled_requests_repeat_by_seed(model: Llama) -> None:
    first, again, other = (
        Engine(model, model).complete(PROMPTS, temperature=1.0, seed=seed, top_p=0.9) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_failed_row_leaves_the_others_their_drafts(model: Llama, make_model: MakeModel) -> None:
    def poisonous(weight: torch.Tensor) -> torch.Tensor:
        weight = weight.clone()
        weight[63] = float("nan")
        return weight

    def unsaid(weight: torch.Tensor) -> torch.Tensor:
        weight = weight.clone()
        weight[63] = 0.0
        return weight

    poisoned = make_model(embed_tokens=poisonous, lm_head=unsaid)
    clean = [[t % 60 for t in prompt] for prompt in PROMPTS[:2]]
    engine = Engine(poisoned, poisoned)
    engine.rank.add(Request("bad", StoredTokens([1, 63, 2]), SamplingParams(temperature=0.0)))
    outputs = engine.rank.step(0.0)
    assert [output.finish_reason for output in outputs] == ["error"]
    expected = Engine(poisoned, None).complete(clean)
    assert engine.complete(clean) == expected
    assert engine.rejected == 0


def test_a_mixture_that_drafts_makes_the_passes_of_its_group(model: Llama) -> None:
    """As many as were agreed, with rows and without: its experts serve the other ranks in each."""
    begun, tokens = [], []

    class Exchange(LocalExchange):
        def begin(self, mode: int, size: int, inert: torch.Tensor | None = None) -> None:
            begun.append((mode, size))
            super().begin(mode, size, inert)

        def dispatch(self, routed: Routed, placement: Placement) -> Routed:
            tokens.append(len(routed.hidden))
            return super().dispatch(routed, placement)

    experts = ExpertConfig(num_experts=2, top_k=1, intermediate_size=8, normalise=True)
    config = replace(model.config, num_layers=1, experts=experts)
    shapes = {"embed_tokens": (64, 32), "lm_head": (64, 32), "gate": (2, 32), "o_proj": (32, 32)}
    shapes |= {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32)}
    shapes |= {"gate_proj": (8, 32), "up_proj": (8, 32), "down_proj": (32, 8)}
    generator = torch.Generator().manual_seed(1)
    names = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    draft = Llama(config, torch.float32, lambda name: names.get(name.split(".")[-2], torch.ones(32)), Exchange())
    engine = Engine(model, draft)
    agreement = Agreement(0, RUN, FULL, 8, (8,), K, False)
    engine.rank.executor.launch(StepPlan(0, (), 0, 0), agreement)
    engine.rank.executor.collect()
    assert (begun, tokens) == ([(NONE, 0)] * K, [0] * K)
    begun.clear()
    tokens.clear()
    engine.rank.add(Request("first", StoredTokens(PROMPTS[1]), SamplingParams(temperature=0.0, max_tokens=2)))
    engine.rank.begin(0.0)
    engine.rank.launch(agreement)
    engine.rank.finish(engine.rank.collect(), 0.0)
    assert (begun, tokens) == ([(NONE, 0)] * K, [len(PROMPTS[1]) + 1, 1, 1])
    while engine.rank.has_work:
        engine.rank.step(0.0)
    assert engine.complete(PROMPTS) == Engine(model, None).complete(PROMPTS)


def test_draft_models_that_do_not_fit_are_refused(model: Llama, make_model: MakeModel) -> None:
    other = make_model()
    other.config = replace(other.config, vocab_size=65)
    with pytest.raises(ConfigError, match=r"speculation\.model: its vocabulary has 65 tokens, that of the model 64"):
        Engine(model, other)
    other.config = replace(model.config, max_position=100)
    with pytest.raises(ConfigError, match=r"speculation\.model: its context is 100 tokens"):
        Engine(model, other)
    speculation = SpeculationConfig(method="draft_model", model="x", num_speculative_tokens=2)
    config = EngineConfig(scheduler=SchedulerConfig(max_model_len=128), speculation=speculation)
    with pytest.raises(ConfigError, match=r"speculation\.model: method 'draft_model' needs"):
        ModelExecutor(model, config)
