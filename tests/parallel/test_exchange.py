# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes that share the experts of a mixture, in every exchange, against transformers.

One group of each size runs everything once; the tests look at what it wrote.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from tests.parallel.mixtures import FAMILIES, reference_greedy, reference_logits, save_mixture
from tests.parallel.program import CONTINUED, EXCHANGES, GREEDY, SCENARIOS, SEQUENCES
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(paceline.__file__).parents[1]
DEADLINE_S = 150.0
RANKS = (2, 4)


def run_group(ranks: int, folder: Path) -> list[dict[Any, Any]]:
    """What each rank wrote. No process is left, however it ends."""
    paths = [str(SOURCES), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    port = str(free_port())
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(ranks):
            command = [sys.executable, "-m", "tests.parallel.program", str(rank), str(ranks), port, str(folder)]
            log = stack.enter_context((folder / f"{ranks}-{rank}.log").open("w"))
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        for rank, process in enumerate(processes):
            status = process.wait(DEADLINE_S)
            assert status == 0, (folder / f"{ranks}-{rank}.log").read_text()[-3000:]
    return [torch.load(folder / f"{ranks}-{rank}.pt", weights_only=False) for rank in range(ranks)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("mixtures")
    return folder, {family: save_mixture(folder / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def expected(models: tuple[Path, dict[str, Any]]) -> dict[tuple[str, str], tuple[torch.Tensor, list[int]]]:
    """By family and sequence: logits, and the tokens that follow."""
    return {
        (family, name): (reference_logits(model, ids), reference_greedy(model, ids, GREEDY))
        for family, model in models[1].items()
        for name, ids in SEQUENCES.items()
    }


@pytest.fixture(scope="module", params=RANKS)
def group(request: pytest.FixtureRequest, models: tuple[Path, dict[str, Any]]) -> list[dict[Any, Any]]:
    """What each rank of a group found."""
    return run_group(request.param, models[0])


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_that_share_experts_say_what_transformers_says(
    group: list[dict[Any, Any]], expected: dict[tuple[str, str], Any], family: str, exchange: str
) -> None:
    ranks = len(group)
    for scenario, by_rank in SCENARIOS.items():
        for rank, names in enumerate(by_rank[:ranks]):
            for name in names:
                found = group[rank][family, exchange, scenario, name]
                logits, tokens = expected[family, name]
                torch.testing.assert_close(found["logits"], logits, atol=1e-4, rtol=0, msg=f"{scenario} {name}")
                assert found["tokens"] == (tokens if scenario in CONTINUED else []), (scenario, name)


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize("group", [2], indirect=True)
def test_fewer_bits_travel_as_well(group: list[dict[Any, Any]], kind: str) -> None:
    for found in group:
        for exchange in EXCHANGES:
            shared, alone = found["fewer bits"][kind, exchange]
            # Sums are rounded in another order, which may make a router choose another expert.
            assert ((shared - alone).abs() / alone.std()).median() < 0.02, exchange
            assert alone.std() > 0.5


def test_ranks_that_differ_in_their_terms_are_told(group: list[dict[Any, Any]]) -> None:
    for found in group:
        assert "they are out of step" in found["out of step"]


def test_a_rank_that_brings_more_tokens_than_agreed_on_is_told(group: list[dict[Any, Any]]) -> None:
    for rank, found in enumerate(group):
        assert found["too many"] == f"13 tokens on rank {rank}, but 4 were agreed on"


def test_ranks_without_common_memory_use_collectives(group: list[dict[Any, Any]]) -> None:
    assert [found["unreachable"] for found in group] == ["GroupExchange"] * len(group)


def test_a_peer_that_does_not_come_is_named(group: list[dict[Any, Any]]) -> None:
    last = len(group) - 1
    assert [found["abandoned"] for found in group[:last]] == [
        f"rank {last} did not come to a common step within 1.0 s"
    ] * last
