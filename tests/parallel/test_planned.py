# SPDX-License-Identifier: Apache-2.0
"""The planned form of the exchange in memory beside the exchange itself; ranks are threads."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from paceline.core.graphs import FULL, NONE
from paceline.engine.line import PeerLost
from paceline.models.experts import Placement, Routed
from paceline.models.kernels import Array
from paceline.models.planned import PlannedExchange, Tokens, planned
from paceline.parallel.board import ROWS_BYTES, Board
from paceline.parallel.shared import SharedExchange

SIZE, TOP_K, EXPERTS, TOKENS, DEADLINE_S = 20, 2, 5, 8, 30.0

Act = Callable[[SharedExchange], object]


def together(acts: Sequence[Act], timeout_s: float = DEADLINE_S) -> list[object]:
    """What each rank's act returned, or raised."""
    ranks = len(acts)
    memory = mmap.mmap(-1, ranks * (1 + ranks) * ROWS_BYTES + (1 << 20))
    ended: list[object] = [None] * ranks

    def run(rank: int) -> None:
        try:
            ended[rank] = acts[rank](SharedExchange(Board(memory, rank, ranks, timeout_s)))
        except Exception as error:
            ended[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads)
    return ended


def tokens_of(rank: int, turn: int, count: int) -> Tokens:
    draw = np.random.default_rng([rank, turn])
    return (
        draw.standard_normal((count, SIZE)).astype(np.float32),
        draw.integers(0, EXPERTS + 1, (count, TOP_K)),
        draw.random((count, TOP_K), dtype=np.float32),
    )


def plan(exchange: SharedExchange, tokens: int = TOKENS) -> PlannedExchange:
    return planned(exchange, tokens, SIZE, Placement(EXPERTS, exchange.ranks), TOP_K)


def computed(rank: int, tokens: Tokens) -> Array:
    """What ``rank`` makes of all tokens: another number on each, so that no order of adding goes unnoticed."""
    hidden, experts, weights = tokens
    return (hidden * weights.sum(1, keepdims=True) * np.float32(1.1 + rank) + experts.sum(1, keepdims=True)).astype(
        np.float32
    )


def by_plan(counts: Sequence[int], late_s: float = 0.0) -> Act:
    """Exchange by the planned form, so many tokens in each turn."""

    def act(exchange: SharedExchange) -> list[tuple[Array, ...]]:
        form, found = plan(exchange), []
        for turn, count in enumerate(counts):
            time.sleep(late_s)
            exchange.begin(FULL, TOKENS)
            arrived = form.dispatch(tokens_of(exchange.rank, turn, count))
            kept = tuple(part.copy() for part in arrived)
            time.sleep(late_s)
            found.append((*kept, form.combine(computed(exchange.rank, arrived)).copy()))
        return found

    return act


def by_tensors(counts: Sequence[int]) -> Act:
    """The same by the exchange itself."""

    def act(exchange: SharedExchange) -> list[tuple[Array, ...]]:
        found = []
        for turn, count in enumerate(counts):
            exchange.begin(FULL, TOKENS)
            own = Routed(*map(torch.from_numpy, tokens_of(exchange.rank, turn, count)))
            got = exchange.dispatch(own, Placement(EXPERTS, exchange.ranks))
            arrived = (got.hidden.numpy(), got.experts.numpy(), got.weights.numpy())
            out = exchange.combine(torch.from_numpy(computed(exchange.rank, arrived)))
            found.append((*arrived, out.numpy()))
        return found

    return act


UNEVEN = ([4, 0, 8, 1], [0, 0, 8, 3], [1, 2, 8, 0])


@pytest.mark.parametrize("late_s", [0.0, 0.01])
@pytest.mark.parametrize("ranks", [2, 3])
def test_it_brings_what_the_exchange_brings(ranks: int, late_s: float) -> None:
    """Uneven counts, ranks without tokens, and one that is late; some ranks by plan beside others without."""
    expected = together([by_tensors(counts) for counts in UNEVEN[:ranks]])
    for acts in (
        [by_plan(counts, late_s * (i == 1)) for i, counts in enumerate(UNEVEN[:ranks])],
        [by_plan(UNEVEN[0], late_s), *(by_tensors(counts) for counts in UNEVEN[1:ranks])],
    ):
        found = together(acts)
        for turns, wanted in zip(found, expected, strict=True):
            assert isinstance(turns, list), turns
            assert isinstance(wanted, list), wanted
            for turn, same in zip(turns, wanted, strict=True):
                for one, other in zip(turn, same, strict=True):
                    np.testing.assert_array_equal(one, other)


def test_ranks_that_differ_are_told() -> None:
    def other(exchange: SharedExchange) -> None:
        exchange.begin(NONE, 0)
        exchange.dispatch(Routed(*map(torch.from_numpy, tokens_of(1, 0, 2))), Placement(EXPERTS, 2))

    for error in together([by_plan([2]), other]):
        assert isinstance(error, RuntimeError)
        assert "ranks differ in (row bytes, experts, mode, size)" in str(error)


def test_more_tokens_than_planned_for_are_refused() -> None:
    """Nothing is written beyond the buffers."""

    def small(exchange: SharedExchange) -> object:
        exchange.begin(FULL, TOKENS)
        return plan(exchange, 2).dispatch(tokens_of(0, 0, 1))

    def large(exchange: SharedExchange) -> object:
        exchange.begin(FULL, TOKENS)
        return plan(exchange).dispatch(tokens_of(1, 0, 4))

    refused, _ = together([small, large])
    assert isinstance(refused, ValueError)
    assert "ranks brought [1, 4] tokens, and 4 in all are planned for" in str(refused)


def test_more_tokens_than_agreed_on_are_refused() -> None:
    def act(exchange: SharedExchange) -> object:
        exchange.begin(FULL, 4)
        return plan(exchange).dispatch(tokens_of(0, 0, 5))

    for error in together([act, act]):
        assert isinstance(error, ValueError)
        assert "5 tokens on rank" in str(error)


@pytest.mark.parametrize("at", ["dispatch", "combine"])
def test_a_peer_that_does_not_come_is_named(at: str) -> None:
    def leaves(exchange: SharedExchange) -> None:
        if at == "combine":
            exchange.begin(FULL, TOKENS)
            plan(exchange).dispatch(tokens_of(1, 0, 1))

    lost, _ = together([by_plan([1]), leaves], timeout_s=0.3)
    assert isinstance(lost, PeerLost)
    assert "rank 1" in str(lost)
