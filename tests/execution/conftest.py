# SPDX-License-Identifier: Apache-2.0
"""A small random model, and a driver that builds step plans by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.core.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from paceline.core.plan import BlockUpdate, NewSequence, Row, StepPlan, StepResult
from paceline.core.request import SamplingParams, StoredTokens
from paceline.execution.runner import ModelExecutor
from paceline.models.llama import Llama
from tools.gpu.models import TINY, random_weights

CONFIG = replace(TINY, vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, max_position=512)
BLOCK_SIZE = 4


def random_model(**changes: Callable[[torch.Tensor], torch.Tensor]) -> Llama:
    """A model with random weights; ``embed_tokens=f`` and the like change one kind of weight."""
    weights = random_weights(CONFIG, seed=1)

    def get(name: str) -> torch.Tensor:
        change = changes.get(name.split(".")[-2])
        return weights(name) if change is None else change(weights(name))

    return Llama(CONFIG, torch.float32, get)


class Driver:
    """Plays the scheduler for an executor: every sequence gets its own blocks, scattered over the pool."""

    def __init__(self, model: Llama, *, seed: int = 0, max_model_len: int = 256, **speculation: Any) -> None:
        if speculation:
            speculation = {"method": "ngram"} | speculation
        self.config = EngineConfig(
            scheduler=SchedulerConfig(max_model_len=max_model_len),
            cache=CacheConfig(num_blocks=400, block_size=BLOCK_SIZE),
            speculation=SpeculationConfig(**speculation),
        )
        self.executor = ModelExecutor(model, self.config, seed=seed)
        self.step = 0
        self.free = [(i * 10) % 399 + 1 for i in range(399)]
        self.first: list[NewSequence] = []
        self.blocks: list[BlockUpdate] = []

    def take(self, tokens: int) -> list[int]:
        count = -(-tokens // BLOCK_SIZE)
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def add(self, seq: int, prompt: Sequence[int], *, room: int = 64, **params: Any) -> list[int]:
        """Introduce a sequence in the next step, with blocks for its prompt and ``room`` more tokens."""
        params = {"temperature": 0.0} | params
        self.first.append(NewSequence(seq, str(seq), StoredTokens(list(prompt)), SamplingParams(**params)))
        return self.assign(seq, len(prompt) + room)

    def assign(self, seq: int, tokens: int, *, replace: bool = True) -> list[int]:
        blocks = self.take(tokens)
        self.blocks.append(BlockUpdate(seq, 0, replace, blocks))
        return blocks

    def run(self, *rows: Row, retired: Sequence[int] = ()) -> StepResult:
        plan = StepPlan(self.step, rows, sum(row.n for row in rows), 0, self.first, self.blocks, retired)
        self.step, self.first, self.blocks = self.step + 1, [], []
        self.executor.launch(plan, None)
        return self.executor.collect()

    def generate(self, seq: int, length: int, count: int) -> list[int]:
        """Decode ``count`` tokens of a sequence whose prompt of ``length`` tokens was introduced, alone."""
        tokens = list(self.run(Row(seq, 0, length, (), True)).sampled[0])
        while len(tokens) < count:
            tokens += self.run(Row(seq, length + len(tokens) - 1, 1, (), True)).sampled[0]
        return tokens


@pytest.fixture(scope="session")
def model() -> Llama:
    return random_model()


@pytest.fixture
def make_model() -> Callable[..., Llama]:
    return random_model


@pytest.fixture
def make_driver(model: Llama) -> Callable[..., Driver]:
    """A driver of the small model, or of ``model=``."""

    def make(**options: Any) -> Driver:
        return Driver(options.pop("model", model), **options)

    return make
