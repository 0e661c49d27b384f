# SPDX-License-Identifier: Apache-2.0
"""The checks of this folder find faults: each fault put into the scheduler on purpose breaks a scenario before long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.core import running, scheduler
from paceline.core.kv.manager import KVManager
from paceline.core.kv.pool import BlockPool

from .scenarios import play
from .shadow import Wrong

SEED = 2
SCENARIOS = 400

release = BlockPool.release

FAULTS: dict[str, tuple[object, str, Callable[..., Any], str]] = {
    "a block leaks": (BlockPool, "release", lambda pool, table: release(pool, table[1:]), "reference counts"),
    "a hit gains no owner": (BlockPool, "touch", lambda pool, blocks: None, "reference counts|twice"),
    "hashes outlive a failure": (KVManager, "unhash_from", lambda kv, request, first: [], "can be hit"),
    "any result is committed": (scheduler, "validate_result", lambda *arguments: None, "committed|scenario"),
    "blocks of a transfer are freed": (
        scheduler,
        "hold_blocks",
        lambda s, request, **_: s.kv.release(request),
        "are free",
    ),
    "short rows stay short": (running, "pad", lambda drafts, K: drafts, "wide"),
}


def play_many(count: int) -> None:
    for index in range(count):
        play(SEED, index)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, what, fault, found = FAULTS[name]
    monkeypatch.setattr(where, what, fault)
    with pytest.raises(Wrong, match=found):
        play_many(SCENARIOS)


def test_a_failure_says_how_to_play_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "release", lambda pool, table: None)
    with pytest.raises(Wrong, match=r"python -m tests\.props\.scenarios --seed 2 --index 0"):
        play(SEED, 0)
