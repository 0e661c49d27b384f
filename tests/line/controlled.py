# SPDX-License-Identifier: Apache-2.0
"""A connector that keeps the KV of prompts that its rank has computed, and gives it back as a test tells it to.

The test and the ranks meet in a folder. What a file says of a prompt holds from its second request on:

    bring   synchronously (also where no file says anything)
    hold    synchronously, once the test has released it; the rank stands between vote and forward until then
    later   asynchronously, arriving once the test has released it
    lose    synchronously, but nothing arrives; the blocks are told
    raise   synchronously, but an exception comes instead
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.connectors.outside import ConnectorContext
from paceline.core.connector import SchedulerConnector, WorkerConnector
from paceline.core.plan import StepPlan
from paceline.core.request import Request
from tests.server.harness import wait_until

STORE = "store"


def name_of(prompt: Sequence[int]) -> str:
    """What the files of a prompt are called."""
    return hashlib.blake2b(repr(list(prompt)).encode(), digest_size=8).hexdigest()


class Control:
    """The test's side."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def say(self, prompt: Sequence[int], how: str) -> None:
        """What becomes of the next loads of ``prompt``."""
        for suffix in ("held", "released"):
            (self.folder / f"{name_of(prompt)}.{suffix}").unlink(missing_ok=True)
        (self.folder / name_of(prompt)).write_text(how)

    def release(self, prompt: Sequence[int]) -> None:
        (self.folder / f"{name_of(prompt)}.released").touch()

    def wait_held(self, prompt: Sequence[int]) -> None:
        """Wait until a rank stands between vote and forward, with the load of ``prompt``."""
        wait_until((self.folder / f"{name_of(prompt)}.held").exists, "a load to be held")


class Order(NamedTuple):
    """What the worker half shall do with the KV of one prompt."""

    how: str
    prompt: str
    seq: int
    generation: int
    blocks: tuple[int, ...]


class ControlledConnector:
    """Named by ``kv_connector``; ``kv_connector_extra_config`` has the ``folder``."""

    @staticmethod
    def scheduler_half(context: ConnectorContext) -> SchedulerConnector:
        return ControlledScheduler(Path(context.extra_config["folder"]), context.engine.cache.block_size)

    @staticmethod
    def worker_half(context: ConnectorContext) -> WorkerConnector:
        from tests.line.controlled_worker import ControlledWorker

        return ControlledWorker(Path(context.extra_config["folder"]))


class ControlledScheduler:
    """Offers all but the last token of prompts that were computed here before."""

    def __init__(self, folder: Path, block_size: int) -> None:
        self._folder = folder
        self._block_size = block_size
        self._kept: set[str] = set()
        self._computing: dict[int, Request] = {}
        self._orders: list[Order] = []

    def get_num_new_matched_tokens(self, request: Request, num_computed: int) -> tuple[int, bool]:
        prompt = _name(request)
        if prompt not in self._kept:
            return 0, False
        return max(0, request.num_prompt - 1 - num_computed), self._how(prompt) == "later"

    def update_state_after_alloc(self, request: Request, blocks: Sequence[Sequence[int]], num_external: int) -> None:
        prompt = _name(request)
        if num_external:
            self._orders.append(self._order(self._how(prompt), request, request.num_prompt - 1))
        elif prompt not in self._kept:
            self._computing[request.seq] = request

    def build_connector_meta(self, plan: StepPlan) -> list[Order] | None:
        for row in plan.rows:
            request = self._computing.get(row.seq)
            if request is not None and row.start + row.n >= request.num_prompt:
                del self._computing[row.seq]
                self._kept.add(_name(request))
                self._orders.append(self._order(STORE, request, request.num_prompt))
        orders, self._orders = self._orders, []
        return orders or None

    def request_finished(self, request: Request, blocks: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        self._computing.pop(request.seq, None)
        return False, None

    def _how(self, prompt: str) -> str:
        told = self._folder / prompt
        return told.read_text() if told.exists() else "bring"

    def _order(self, how: str, request: Request, tokens: int) -> Order:
        blocks = request.tables[0][: -(-tokens // self._block_size)]
        return Order(how, _name(request), request.seq, request.generation, tuple(blocks))


def _name(request: Request) -> str:
    return name_of(request.source.tokens(0, request.num_prompt))
