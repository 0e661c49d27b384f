# SPDX-License-Identifier: Apache-2.0
"""Both halves of the KV connector that an engine was asked for."""

from __future__ import annotations

from paceline.connectors.config import KVTransferConfig
from paceline.connectors.decode_bench.scheduler import DecodeBenchScheduler
from paceline.connectors.decode_bench.worker import DecodeBenchWorker
from paceline.connectors.outside import ConnectorContext, require_methods
from paceline.core.config import EngineConfig
from paceline.core.connector import SchedulerConnector, WorkerConnector


def connector_halves(
    asked: KVTransferConfig | None, config: EngineConfig, seed: int, rank: int = 0
) -> tuple[SchedulerConnector | None, WorkerConnector | None]:
    """The half beside the scheduler and the half beside the KV cache; None twice if no connector was asked for.

    ``seed``: of noise that a connector may fill blocks with; another on each data-parallel ``rank``.

    Raises:
        ConfigError: a connector from outside made a half that lacks a method.
    """
    if asked is None:
        return None, None
    if asked.outside is None:
        recurrent = [i for i, group in enumerate(config.cache.groups) if group.kind == "recurrent"]
        worker = DecodeBenchWorker(asked.fill.mean, asked.fill.std, seed=seed, zeroed=recurrent)
        return DecodeBenchScheduler(config.cache.block_size), worker
    context = ConnectorContext(engine=config, extra_config=asked.extra_config, role=asked.kv_role, rank=rank, seed=seed)
    beside_scheduler = asked.outside.scheduler_half(context)
    require_methods(beside_scheduler, SchedulerConnector, f"the scheduler half of {asked.kv_connector}")
    beside_cache = asked.outside.worker_half(context)
    require_methods(beside_cache, WorkerConnector, f"the worker half of {asked.kv_connector}")
    return beside_scheduler, beside_cache
