# SPDX-License-Identifier: Apache-2.0
"""Passes of the head in a group: as many on every rank as were agreed, whatever each has to draft."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.core.graphs import FULL, NONE
from paceline.core.lockstep import RUN, Agreement
from paceline.core.plan import PLACEHOLDER, BlockUpdate, NewSequence, Row, StepPlan
from paceline.core.request import SamplingParams, StoredTokens
from paceline.models.eagle3 import Eagle3
from paceline.models.eagle3_checkpoint import load_eagle3
from paceline.models.experts import LocalExchange, Placement, Routed
from paceline.models.llama import Llama
from tests.eagle3.heads import UNEVEN, Engine, K, Reference, run_uneven, save_head
from tests.eagle3.test_drafter import check_drafts

W = 1 + K


class CountingExchange(LocalExchange):
    """Notes the terms of each pass, and how many tokens its mixture was given."""

    def __init__(self) -> None:
        super().__init__()
        self.terms: list[tuple[int, int]] = []
        self.tokens: list[int] = []

    def begin(self, mode: int, size: int, inert: Tensor | None = None) -> None:
        super().begin(mode, size, inert)
        self.terms.append((mode, size))

    def dispatch(self, tokens: Routed, placement: Placement) -> Routed:
        self.tokens.append(len(tokens.hidden))
        return super().dispatch(tokens, placement)


class Table:
    """Where the ranks of a group, each a thread, put down what they exchange."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.barrier = threading.Barrier(ranks, timeout=60)
        self.places: list[object] = [None] * ranks

    def swap(self, rank: int, given: object) -> list[object]:
        self.places[rank] = given
        self.barrier.wait()
        got = list(self.places)
        self.barrier.wait()
        return got


class ThreadExchange:
    """Experts shared by threads. Ranks that disagree on what comes next fail, or wait until the barrier breaks."""

    def __init__(self, table: Table, rank: int) -> None:
        self.rank, self.ranks = rank, table.ranks
        self.inert: Tensor | None = None
        self.terms: list[tuple[int, int]] = []
        self._table = table
        self._counts: list[int] = []

    def begin(self, mode: int, size: int, inert: Tensor | None = None) -> None:
        assert len(set(self._table.swap(self.rank, ("begin", mode, size)))) == 1
        self.inert = inert
        self.terms.append((mode, size))

    def dispatch(self, tokens: Routed, placement: Placement) -> Routed:
        mode, size = self.terms[-1]
        assert mode == NONE or len(tokens.hidden) <= size
        got = [routed for routed in self._table.swap(self.rank, tokens) if isinstance(routed, Routed)]
        assert len(got) == self.ranks
        self._counts = [len(routed.hidden) for routed in got]
        return Routed(*(torch.cat([getattr(r, part) for r in got]) for part in ("hidden", "experts", "weights")))

    def combine(self, partial: Tensor) -> Tensor:
        sums = torch.stack([x for x in self._table.swap(self.rank, partial) if isinstance(x, Tensor)]).sum(0)
        return sums.split(self._counts)[self.rank]


def agreed(mode: int, size: int, passes: int) -> Agreement:
    return Agreement(0, RUN, mode, size, (size or 3,), passes, False)


@pytest.fixture
def counted(target: Llama, target_folder: Path, tmp_path: Path) -> tuple[Engine, CountingExchange]:
    exchange = CountingExchange()
    head = load_eagle3(save_head(target_folder, tmp_path, experts=4), target, parallel=exchange)
    return Engine(target, head, max_model_len=64), exchange


@pytest.mark.parametrize("passes", [K, K + 2])
@pytest.mark.parametrize(("mode", "size"), [(NONE, 0), (FULL, 8)])
def test_a_rank_without_rows_makes_the_passes_of_the_others(
    counted: tuple[Engine, CountingExchange], mode: int, size: int, passes: int
) -> None:
    engine, exchange = counted
    engine.executor.launch(StepPlan(0, (), 0, 0), agreed(mode, size, passes))
    assert engine.executor.collect().next_drafts == ()
    assert exchange.terms == [(mode, size), *[(mode, size // W)] * (passes - 1)]
    assert exchange.tokens == [0] * passes


def test_rows_that_draft_less_make_all_passes(counted: tuple[Engine, CountingExchange]) -> None:
    """A chunk that samples nothing, a prompt one short of the context, and one that fills it."""
    engine, exchange = counted
    for seq, (length, chunk) in enumerate([(40, 8), (62, 62), (63, 63)]):
        source = StoredTokens([(7 * i + seq) % 256 for i in range(length)])
        new = NewSequence(seq, str(seq), source, SamplingParams(temperature=0.0))
        blocks = engine_blocks(engine, seq)
        row = Row(seq, 0, chunk, (), chunk == length)
        plan = StepPlan(seq, (row,), chunk, 0, first=(new,), blocks=(blocks,))
        exchange.tokens.clear()
        engine.executor.launch(plan, agreed(NONE, 0, K + 1))
        [drafts] = engine.executor.collect().next_drafts
        room = 64 - length - 1
        assert len(drafts) == (room if chunk == length else 0)
        assert exchange.tokens == [chunk, *[1] * max(0, len(drafts) - 1), *[0] * (K + 1 - max(1, len(drafts)))]


def test_the_first_pass_of_a_padded_row_computes_its_one_position(counted: tuple[Engine, CountingExchange]) -> None:
    engine, exchange = counted
    source = StoredTokens(list(range(1, 22)))
    new = NewSequence(0, "0", source, SamplingParams(temperature=0.0))
    blocks = engine_blocks(engine, 0)
    chunk = Row(0, 0, 20, (), False)
    engine.executor.launch(StepPlan(0, (chunk,), 20, 0, first=(new,), blocks=(blocks,)), agreed(NONE, 0, K))
    engine.executor.collect()
    exchange.tokens.clear()
    padded = Row(0, 20, W, (PLACEHOLDER,) * K, True)
    engine.executor.launch(StepPlan(1, (padded,), W, W), agreed(FULL, W, K))
    [drafts] = engine.executor.collect().next_drafts
    assert len(drafts) == K
    assert exchange.tokens == [1] * K


def engine_blocks(engine: Engine, seq: int) -> BlockUpdate:
    count = engine.config.scheduler.max_model_len // engine.config.cache.block_size + 1
    return BlockUpdate(seq, 0, True, list(range(1 + seq * count, 1 + (seq + 1) * count)))


@pytest.mark.parametrize("graphs", [False, True])
def test_ranks_that_share_the_experts_of_a_head_draft_as_one_alone(
    target: Llama, target_folder: Path, tmp_path: Path, graphs: bool
) -> None:
    """Two ranks in step, uneven: one prefills while the other decodes, idles at the end, and wakes for one more."""
    folder = save_head(target_folder, tmp_path, experts=4)
    reference = Reference(target_folder, folder)
    table = Table(2)
    exchanges = [ThreadExchange(table, rank) for rank in range(2)]
    heads: list[Eagle3] = [load_eagle3(folder, target, parallel=e) for e in exchanges]
    engines = [Engine(target, head, graphs=graphs, max_num_batched_tokens=24) for head in heads]
    modes = run_uneven(engines)
    assert exchanges[0].terms == exchanges[1].terms
    assert len(exchanges[0].terms) == K * sum(modes)
    assert (modes[FULL] > 20) == graphs
    for engine, (prompts, count) in zip(engines, UNEVEN, strict=True):
        assert list(engine.outputs.values()) == Engine(target, None).complete(prompts, max_tokens=count)
        assert check_drafts(engine, reference) > 50
