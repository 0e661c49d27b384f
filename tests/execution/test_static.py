# SPDX-License-Identifier: Apache-2.0
"""The static backend of FULL steps: what the general path computes, for its own rows and for nobody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.execution.attention import PagedAttention, RowSpan
from paceline.execution.kvcache import KVCache
from paceline.models.experts import LocalExchange
from paceline.models.llama import Llama, Taps
from paceline.models.registry import load_model
from paceline.models.static import StaticLimits, StaticMixture
from tests.parallel.mixtures import FAMILIES, save_mixture

BLOCK, WIDTH, ROWS, CONTEXT = 4, 3, 4, 50
TAPS = (0, 1, 3)
MAX_BLOCKS = 16


class Rig:
    """A model, a cache in which each of ROWS rows has a context of its own, and the static backend on both."""

    def __init__(self, model: Llama) -> None:
        c = model.config
        self.model = model
        self.cache = KVCache(c, 100, BLOCK, model.dtype)
        assert self.cache.bits is not None
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(1, c.vocab_size, (ROWS, 64), generator=generator)
        order = np.random.default_rng(5).permutation(np.arange(1, 97))
        self.tables = [order[20 * i : 20 * i + 20] for i in range(ROWS)]
        self.starts = [CONTEXT - 7 * i for i in range(ROWS)]
        with torch.inference_mode():
            for i, start in enumerate(self.starts):
                self.general([i], 0, start)
        self.static = StaticMixture(model, self.cache.bits, StaticLimits(WIDTH, ROWS, MAX_BLOCKS, TAPS))

    def tokens(self, rows: list[int], start: int | None, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        begins = [self.starts[i] if start is None else start for i in rows]
        parts = [self.ids[i, begin : begin + n] for i, begin in zip(rows, begins, strict=True)]
        return torch.cat(parts), torch.cat([torch.arange(begin, begin + n) for begin in begins])

    def general(self, rows: list[int], start: int | None = None, n: int = WIDTH) -> tuple[torch.Tensor, Taps]:
        spans = [RowSpan(self.starts[i] if start is None else start, n, self.tables[i]) for i in rows]
        taps = Taps(TAPS)
        tokens, positions = self.tokens(rows, start, n)
        attention = PagedAttention(self.cache, spans, self.model.config.num_heads)
        with torch.inference_mode():
            return self.model.forward(tokens, positions, attention, taps), taps

    def step(self, rows: list[int], **options: Any) -> tuple[torch.Tensor, Taps]:
        """The static backend's step of ``rows``; copies, since the next one overwrites what it gives."""
        taps = Taps(TAPS)
        planned = [(self.starts[i], WIDTH, self.tables[i]) for i in rows]
        with torch.inference_mode():
            hidden = self.static.forward(*self.tokens(rows, None, WIDTH), planned, taps, **options)
        assert hidden is not None
        return hidden.clone(), Taps(TAPS, [state.clone() for state in taps.states])


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    save_mixture(made, request.param)
    return made


@pytest.fixture(scope="module")
def rig(folder: Path) -> Rig:
    return Rig(load_model(folder, quantization="int8").model)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_it_computes_what_the_general_path_does(rig: Rig, folder: Path) -> None:
    """Floats add up in another order, which moves a few numbers by a step when they are rounded to int8: both paths
    are further from float32 than from each other."""
    rows = list(range(ROWS))
    (expected, taps), (found, tapped) = rig.general(rows), rig.step(rows)
    print(distance(found, expected), [distance(a, b) for a, b in zip(tapped.states, taps.states, strict=True)])
    assert len(tapped.states) == len(TAPS)
