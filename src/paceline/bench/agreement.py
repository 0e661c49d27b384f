# SPDX-License-Identifier: Apache-2.0
"""What agreeing on a step costs each rank, the collective that carries the votes apart.

Timed: the own vote's graph mode and its packing (dispatch), unpacking the votes of all ranks, and `agree`.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from paceline.core.config import EngineConfig, GraphConfig, SchedulerConfig, SpeculationConfig
from paceline.core.graphs import GraphDispatcher
from paceline.core.lockstep import Vote, agree
from paceline.engine.collector import collector_paused
from paceline.engine.line import pack_vote, unpack_vote

K = 3
BATCH = 100
"""Steps between two looks at the clock."""


def run(ranks: list[int], repeats: int) -> dict[str, Any]:
    """Median microseconds over ``repeats`` batches, for each number of ranks."""
    with collector_paused():
        rows = [measure(count, repeats) for count in ranks]
    return {"rows": rows, "num_speculative_tokens": K, "repeats": repeats}


def measure(ranks: int, repeats: int) -> dict[str, Any]:
    """Microseconds of each part of a step in which every rank decodes a different number of rows."""
    width = 1 + K
    graphs = GraphDispatcher(
        EngineConfig(
            scheduler=SchedulerConfig(max_num_seqs=128),
            speculation=SpeculationConfig(method="eagle3", num_speculative_tokens=K),
            graphs=GraphConfig(mode="FULL_DECODE_ONLY"),
        )
    )

    def vote(rows: int) -> Vote:
        tokens = width * rows
        return Vote(7, 1, tokens, rows, width, graphs.mode_for(tokens, width), True, K, False)

    votes = [vote(1 + 5 * rank % 128) for rank in range(ranks)]
    packed = [pack_vote(v) for v in votes]

    def dispatch() -> None:
        pack_vote(vote(17))

    def unpack() -> None:
        [unpack_vote(fields) for fields in packed]

    def decide() -> None:
        agree(votes, graphs)

    parts = {"dispatch_us": dispatch, "unpack_us": unpack, "agree_us": decide}
    costs: dict[str, Any] = {}
    for name, part in parts.items():
        samples = []
        for _ in range(repeats):
            began = time.perf_counter()
            for _ in range(BATCH):
                part()
            samples.append((time.perf_counter() - began) / BATCH * 1e6)
        costs[name] = statistics.median(samples)
    return {"ranks": ranks, **costs, "total_us": sum(costs.values())}
