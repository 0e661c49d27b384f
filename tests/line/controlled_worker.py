# SPDX-License-Identifier: Apache-2.0
"""The half of the controlled connector that lies beside the KV cache."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from paceline.core.plan import TransferEvent
from tests.line.controlled import STORE, Order
from tests.server.harness import DEADLINE_S

LOST = "the other side is gone"


class ControlledWorker:
    """Copies of blocks, by prompt, in main memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._layers: Sequence[Tensor] = ()
        self._kept: dict[str, list[Tensor]] = {}
        self._stores: list[Order] = []
        self._later: list[Order] = []
        self._ended: list[TransferEvent] = []
        self._bad: set[int] = set()

    def register_kv_caches(self, caches: Sequence[Sequence[Tensor]]) -> None:
        [self._layers] = caches

    def start_load_kv(self, meta: Sequence[Order]) -> None:
        for order in meta:
            if order.how == STORE:
                self._stores.append(order)
            elif order.how == "later":
                self._later.append(order)
            elif order.how == "raise":
                raise ConnectionError(LOST)
            elif order.how == "lose":
                self._bad.update(order.blocks)
                event = TransferEvent("loaded", order.seq, order.generation, error=LOST, failed_blocks=order.blocks)
                self._ended.append(event)
            else:
                if order.how == "hold":
                    self._hold(order)
                self._bring(order)

    def _hold(self, order: Order) -> None:
        (self._folder / f"{order.prompt}.held").touch()
        ends = time.monotonic() + DEADLINE_S
        while not self._released(order):
            if time.monotonic() > ends:
                raise TimeoutError("nobody released the load")
            time.sleep(0.01)

    def _released(self, order: Order) -> bool:
        return (self._folder / f"{order.prompt}.released").exists()

    def _bring(self, order: Order) -> None:
        for layer, kept in zip(self._layers, self._kept[order.prompt], strict=True):
            layer[list(order.blocks)] = kept[: len(order.blocks)]

    def wait_for_layer_load(self, layer: int) -> None:
        """Synchronous loads are complete before the first layer."""

    def save_kv_layer(self, layer: int, cache: Tensor) -> None:
        """All layers are stored at the end of the step, a drafter's with them."""

    def wait_for_save(self) -> None:
        for order in self._stores:
            self._kept[order.prompt] = [layer[list(order.blocks)].clone() for layer in self._layers]
        self._stores.clear()

    def get_finished(self) -> Sequence[TransferEvent]:
        ended, self._ended = self._ended, []
        for order in [order for order in self._later if self._released(order)]:
            self._later.remove(order)
            self._bring(order)
            ended.append(TransferEvent("loaded", order.seq, order.generation))
        return ended

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        bad, self._bad = frozenset(self._bad), set()
        return bad

    def handle_preemptions(self, seqs: Sequence[int]) -> None:
        """What was stored are copies."""

    def shutdown(self) -> None:
        (self._folder / f"{os.getpid()}.shut").touch()
