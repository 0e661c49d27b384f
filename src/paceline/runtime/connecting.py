# SPDX-License-Identifier: Apache-2.0
"""Both halves of the KV connector that an engine was asked for."""

from __future__ import annotations

from paceline.connectors.config import KVTransferConfig
from paceline.connectors.decode_bench.scheduler import DecodeBenchScheduler
from paceline.connectors.decode_bench.worker import DecodeBenchWorker
from paceline.core.config import CacheConfig
from paceline.core.connector import SchedulerConnector, WorkerConnector


def connector_halves(
    asked: KVTransferConfig | None, cache: CacheConfig, seed: int
) -> tuple[SchedulerConnector | None, WorkerConnector | None]:
    """The half beside the scheduler and the half beside the KV cache; None twice if no connector was asked for.

    ``seed``: of noise that a connector may fill blocks with.
    """
    if asked is None:
        return None, None
    recurrent = [i for i, group in enumerate(cache.groups) if group.kind == "recurrent"]
    worker = DecodeBenchWorker(asked.fill.mean, asked.fill.std, seed=seed, zeroed=recurrent)
    return DecodeBenchScheduler(cache.block_size), worker
