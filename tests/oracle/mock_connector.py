# SPDX-License-Identifier: Apache-2.0
"""A connector whose answers a scenario dictates: how much each request can load, when it says so, how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.core.plan import StepPlan, TransferEvent
from paceline.core.request import Request


class MockConnector:
    """Scheduler half. ``loads``: request id to ``{"tokens", "async", "later", "steps", "once"}`` (all optional).

    ``tokens`` is the length of the prefix that can be had in all; ``later`` for how many steps from the first
    question the answer is "later"; ``steps`` how long an asynchronous load takes; ``once``: nothing is offered after
    the first load. The driver sets ``step`` and reports what `arrived` returns.
    """

    def __init__(self, loads: dict[str, dict[str, Any]]) -> None:
        self.loads = loads
        self.step = 0
        self._first_asked: dict[str, int] = {}
        self._loaded_once: set[str] = set()
        self._under_way: list[tuple[int, TransferEvent]] = []

    def get_num_new_matched_tokens(self, request: Request, num_computed: int) -> tuple[int | None, bool]:
        load = self.loads.get(request.id, {})
        if load.get("once") and request.id in self._loaded_once:
            return 0, False
        first = self._first_asked.setdefault(request.id, self.step)
        if self.step < first + load.get("later", 0):
            return None, False
        is_async = load.get("async", False)
        prefix = min(load.get("tokens", 0), request.num_tokens - (0 if is_async else 1))
        extra = max(0, prefix - num_computed)
        return extra, is_async and extra > 0

    def update_state_after_alloc(self, request: Request, blocks: Sequence[Sequence[int]], num_external: int) -> None:
        if not num_external:
            return
        self._loaded_once.add(request.id)
        load = self.loads[request.id]
        if load.get("async"):
            event = TransferEvent("loaded", request.seq, request.generation)
            self._under_way.append((self.step + load.get("steps", 1), event))

    def build_connector_meta(self, plan: StepPlan) -> None:
        return None

    def request_finished(self, request: Request, blocks: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def arrived(self) -> tuple[TransferEvent, ...]:
        """Loads that end in this step, each once."""
        ended = tuple(event for at, event in self._under_way if at <= self.step)
        self._under_way = [(at, event) for at, event in self._under_way if at > self.step]
        return ended
