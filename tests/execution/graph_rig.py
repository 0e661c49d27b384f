# SPDX-License-Identifier: Apache-2.0
"""A model with contexts of several lengths in its cache, and recorded decode graphs on both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from paceline.core.plan import NewSequence, Row
from paceline.core.request import SamplingParams, StoredTokens
from paceline.execution.attention import PagedAttention
from paceline.execution.batch import Batch
from paceline.execution.decode_graphs import DecodeGraphs, GraphLimits
from paceline.execution.full import Computed
from paceline.execution.kvcache import KVCache
from paceline.execution.sequence import SequenceState
from paceline.models.experts import LocalExchange, Placement, Routed
from paceline.models.llama import Llama, Taps
from paceline.models.spec import ExpertConfig
from tests.execution.recording import Recording, Repeating
from tools.gpu.models import TINY, TINY_MIXTURE

BLOCK, WIDTH, ROWS = 4, 3, 4
LENGTHS = (4, 8, 16)
STARTS = [50, 24, 11, 3]
SIZES = (2 * WIDTH, ROWS * WIDTH)
TAPS = (0, 2, 4)
SHARED = replace(TINY, qkv_bias=True, qk_norm=True)
SHARED = replace(
    SHARED, experts=ExpertConfig(5, 3, 32, normalise=False, shared_intermediate_size=40, dense_layers=frozenset({1}))
)
SHAPES = {"dense": TINY, "mixture": TINY_MIXTURE, "shared expert": SHARED}


class Watched(LocalExchange):
    """Notes, as part of what is captured, which experts are chosen in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen = torch.full((64, 8), -1)

    def dispatch(self, tokens: Routed, placement: Placement) -> Routed:
        self.chosen[: len(tokens.experts), : tokens.experts.shape[1]].copy_(tokens.experts)
        return tokens


@dataclass
class Rig:
    """A model, a cache in which each of ROWS rows has a context of its own, and graphs on both."""

    model: Llama
    rates: tuple[float, ...] | None = None
    temperature: float = 0.0
    recorder: Repeating | None = None

    def __post_init__(self) -> None:
        c = self.model.config
        self.cache = KVCache(c, 100, BLOCK, self.model.dtype)
        self.ids = np.random.default_rng(3).integers(1, c.vocab_size, (ROWS, 80))
        order = np.random.default_rng(5).permutation(np.arange(1, 97))
        self.tables = [order[24 * i : 24 * i + 24] for i in range(ROWS)]
        for i, start in enumerate(STARTS):
            self.general([Row(i, 0, start, (), True)])
        self.recording = Recording()
        limits = GraphLimits(SIZES, WIDTH, LENGTHS, TAPS, self.rates)
        self.replayed: Recording | Repeating = self.recorder or self.recording
        self.graphs = DecodeGraphs(self.model, self.cache, limits, self.replayed)

    def state(self, row: Row) -> SequenceState:
        """As it is when ``row`` is planned: all its tokens but the drafts are known."""
        known = row.start + row.n - len(row.drafts)
        params = SamplingParams(temperature=self.temperature, seed=100 + row.seq)
        prompt = self.ids[row.seq, :3].tolist()
        state = SequenceState(NewSequence(row.seq, str(row.seq), StoredTokens(prompt), params), 0)
        state.append(self.ids[row.seq, 3:known].tolist())
        state._blocks, state._num_blocks = self.tables[row.seq], len(self.tables[row.seq])
        return state

    def batch(self, rows: list[Row]) -> Batch:
        return Batch.of(rows, [self.state(row) for row in rows], BLOCK)

    def general(self, rows: list[Row]) -> tuple[Batch, torch.Tensor, Taps]:
        """Hidden states of the batch by the general path."""
        batch, taps = self.batch(rows), Taps(TAPS)
        attention = PagedAttention(self.cache, batch.spans, self.model.config.num_heads)
        if self.model.exchange is not None:
            self.model.exchange.begin(0, 0, None)
        with torch.inference_mode():
            tokens, positions = torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions)
            return batch, self.model.forward(tokens, positions, attention, taps), taps

    def step(self, rows: list[Row], size: int = SIZES[-1], **options: Any) -> tuple[Computed, Taps]:
        taps = Taps(TAPS)
        with torch.inference_mode():
            computed = self.graphs.forward(self.batch(rows), size, taps, options.get("connector"))
        assert computed is not None
        return computed, taps

    def row(self, i: int, drafts: tuple[int, ...] = (7, 9), start: int | None = None) -> Row:
        return Row(i, STARTS[i] if start is None else start, WIDTH, drafts, True)
