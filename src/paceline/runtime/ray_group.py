# SPDX-License-Identifier: Apache-2.0
"""Ranks on the machines of a Ray cluster: Ray places them, and each runs as a headless one does."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from paceline.runtime.engine_group import EngineGroup, EngineRefused
from paceline.runtime.headless import run_headless

CPUS_PER_RANK = 1
POLL_S = 0.2
LEAVING_S = 5.0
"""How long tasks may take to end when their ranks have."""


def run_rank(factory: str, options: Mapping[str, Any], rank: int) -> int:
    """A task: run one rank until it ends; its exit status."""
    place = {**options["data_parallel"], "first": rank}
    return run_headless(factory, {**options, "data_parallel": place}, 1, lambda text: print(text, flush=True))


class RayGroup(EngineGroup):
    """As `EngineGroup`; every rank is a Ray task, rank 0 beside the server, so that all can reach it."""

    def __init__(self, factory: str, options: Mapping[str, Any], ranks: int) -> None:
        """Connect to the cluster (RAY_ADDRESS, or one on this machine, started if need be) and start ``ranks`` tasks.

        Raises:
            EngineRefused: Ray is not installed, or the cluster cannot be reached.
        """
        try:
            import ray
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
        except ImportError as error:
            raise EngineRefused("data_parallel_backend: ray is not installed: pip install 'paceline[ray]'") from error
        try:
            # The signals that end the server are its own affair; the tasks' output goes where the server's does.
            ray.init(include_dashboard=False, ignore_reinit_error=True)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise EngineRefused(f"data_parallel_backend: no Ray cluster: {error}") from None
        self._ray = ray
        self._tasks: list[Any] = []
        self._over = threading.Event()
        host = ray.util.get_node_ip_address()
        front, store = _free_ports(host)
        place = {**options.get("data_parallel", {}), "size": ranks, "first": 0, "front": f"{host}:{front}"}
        if place.get("enable_expert_parallel") or place.get("lockstep"):
            place["store"] = f"{host}:{store}"
        chosen = {**options, "data_parallel": place}
        super().__init__(factory, chosen, 0)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        gpus = 1 if options.get("device") == "cuda" else 0
        task = ray.remote(num_cpus=CPUS_PER_RANK, num_gpus=gpus, max_retries=0)(run_rank)
        for rank in range(ranks):
            placed = task.options(scheduling_strategy=here) if rank == 0 else task
            self._tasks.append(placed.remote(factory, chosen, rank))

    def problem(self, missed: Mapping[int, str]) -> str | None:
        """See `EngineGroup`."""
        for rank, task in enumerate(self._tasks):
            if self._ended(task, 0.0):
                return f"rank {rank}: {missed.get(rank, self.epitaph(rank))}"
        return None

    def _ended(self, task: Any, timeout_s: float) -> bool:
        return bool(self._ray.wait([task], timeout=timeout_s)[0])

    def watch(self, ended: Callable[[int], None]) -> None:
        """See `EngineGroup`."""

        def wait() -> None:
            while not self._over.wait(POLL_S):
                for rank, task in enumerate(self._tasks):
                    if self._ended(task, 0.0):
                        ended(rank)
                        return

        threading.Thread(target=wait, name="ray-watch", daemon=True).start()

    def epitaph(self, rank: int) -> str:
        """How a task ended, in words."""
        task = self._tasks[rank]
        if not self._ended(task, 0.0):
            return "its Ray task is running"
        try:
            return f"its Ray task ended with status {self._ray.get(task)}"
        except Exception as error:
            return f"its Ray task failed: {str(error).splitlines()[-1]}"

    def ended_in_order(self, rank: int) -> bool:
        """See `EngineGroup`."""
        return self.epitaph(rank).endswith("with status 0")

    def stop(self, timeout_s: float | None = None) -> None:
        """See `EngineGroup`: in lock-step they leave together when told; the others when the server is gone."""
        self._ray.wait(self._tasks, num_returns=len(self._tasks), timeout=LEAVING_S)
        self.kill()

    def kill(self) -> None:
        """See `EngineGroup`; without a connection to the server the tasks end their ranks, however these are."""
        self._over.set()
        super().kill()
        if self._tasks:
            self._ray.wait(self._tasks, num_returns=len(self._tasks), timeout=LEAVING_S)
        self._ray.shutdown()


def _free_ports(host: str) -> tuple[int, int]:
    """Two ports of ``host`` that nobody uses now."""
    with contextlib.ExitStack() as taken:
        sockets = [taken.enter_context(socket.socket()) for _ in range(2)]
        for each in sockets:
            each.bind((host, 0))
        first, second = (each.getsockname()[1] for each in sockets)
    return first, second
