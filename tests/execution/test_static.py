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


def test_it_computes_what_the_general_path_does(rig: Rig) -> None:
    """Bit by bit: what lies between products is the same compiled code."""
    for rows in ([0, 1, 2, 3], [2, 0], [1]):
        (expected, taps), (found, tapped) = rig.general(rows), rig.step(rows)
        assert torch.equal(found, expected)
        assert len(tapped.states) == len(TAPS)
        for state, reference in zip(tapped.states, taps.states, strict=True):
            assert torch.equal(state, reference)


def test_both_paths_fill_the_cache_alike(rig: Rig) -> None:
    rows = list(range(ROWS))
    rig.general(rows)
    kept = [layer.clone() for layer in rig.cache.layers]
    rig.step(rows)
    for layer, expected in zip(rig.cache.layers, kept, strict=True):
        assert torch.equal(layer, expected)


def test_a_row_is_the_same_alone_and_in_a_batch(rig: Rig) -> None:
    """Bit by bit, whatever the other rows are."""
    together, _ = rig.step([3, 1, 0])
    for place, row in enumerate([3, 1, 0]):
        alone, _ = rig.step([row])
        assert torch.equal(alone, together[place * WIDTH : (place + 1) * WIDTH])


def test_rows_that_are_not_there_write_and_yield_nothing(rig: Rig) -> None:
    """Three rows in a step planned for four (L9): only their own slots change, and a fourth leaves no trace."""
    rig.step([0, 1, 2, 3])
    for layer in rig.cache.layers:
        layer[0] = 7.0
    before = [layer.clone() for layer in rig.cache.layers]
    hidden, taps = rig.step([0, 1, 2])
    assert len(hidden) == 3 * WIDTH
    assert all(len(state) == 3 * WIDTH for state in taps.states)
    own = torch.zeros(100, BLOCK, dtype=torch.bool)
    for i in range(3):
        for position in range(rig.starts[i], rig.starts[i] + WIDTH):
            own[int(rig.tables[i][position // BLOCK]), position % BLOCK] = True
    for layer, kept in zip(rig.cache.layers, before, strict=True):
        changed = (layer != kept).any(-1).any(1).any(1)
        assert not changed[~own].any()


def test_inert_rows_choose_no_expert(rig: Rig) -> None:
    """What they get is garbage that nobody reads; nobody else notices."""
    exchange = rig.model.exchange
    assert isinstance(exchange, LocalExchange)
    expected, _ = rig.step([0, 1])
    inert = torch.arange(2 * WIDTH) < WIDTH
    exchange.begin(1, 2 * WIDTH, inert)
    found, _ = rig.step([0, 1])
    exchange.begin(1, 2 * WIDTH, None)
    assert torch.equal(found[WIDTH:], expected[WIDTH:])
    assert not torch.equal(found[:WIDTH], expected[:WIDTH])


@pytest.mark.parametrize("change", ["longer context", "table ends early", "wider row", "more rows", "other taps"])
def test_what_was_not_planned_for_is_left_alone(rig: Rig, change: str) -> None:
    """A block table longer than the plan's (S14), and the like: None, and the cache is as it was."""
    rows = [(rig.starts[i], WIDTH, rig.tables[i]) for i in range(2)]
    taps = Taps(TAPS)
    if change == "longer context":
        rows[1] = (MAX_BLOCKS * BLOCK - 1, WIDTH, rig.tables[1])
    elif change == "table ends early":
        rows[1] = (rig.starts[1], WIDTH, rig.tables[1][: rig.starts[1] // BLOCK])
    elif change == "wider row":
        rows = [(rig.starts[0], 2 * WIDTH, rig.tables[0])]
    elif change == "more rows":
        rows = rows * 3
    else:
        taps = Taps((1,))
    before = [layer.clone() for layer in rig.cache.layers]
    count = sum(n for _, n, _ in rows)
    with torch.inference_mode():
        assert rig.static.forward(torch.ones(count, dtype=torch.int64), torch.arange(count), rows, taps) is None
    assert not taps.states
    assert all(torch.equal(layer, kept) for layer, kept in zip(rig.cache.layers, before, strict=True))


def test_a_connector_is_called_around_each_layer(rig: Rig) -> None:
    seen: list[str] = []

    def around(inner: Any) -> Any:
        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            seen.append(f"before {layer}")
            out = inner(layer, q, k, v)
            seen.append(f"after {layer}")
            return out

        return attend

    expected, _ = rig.step([1, 2])
    found, _ = rig.step([1, 2], around=around)
    assert torch.equal(found, expected)
    layers = range(rig.model.config.num_layers)
    assert seen == [f"{when} {layer}" for layer in layers for when in ("before", "after")]


def test_weights_are_held_once(folder: Path) -> None:
    """The general path reads the very memory that the static backend does, and yields what it did before."""
    model = load_model(folder, quantization="int8").model
    hidden = torch.randn(5, model.config.hidden_size)
    mixture = next(layer.experts for layer in model.layers if layer.experts is not None)
    with torch.inference_mode():
        before = [mixture.gate_up[e](hidden) for e in range(model.config.experts.num_experts)]  # type: ignore[union-attr]
        Rig(model)
        Rig(model)
        after = [weight(hidden) for weight in mixture.gate_up]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    bases = {id(weight.arrays[0].base) for weight in mixture.gate_up}
    assert len(bases) == 1
