# SPDX-License-Identifier: Apache-2.0
"""The worker half of a KV connector, called at its places in a step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter

from torch import Tensor

from paceline.core.connector import WorkerConnector
from paceline.core.plan import Row, StepPlan, TransferEvent
from paceline.execution.sequence import SequenceState
from paceline.models.llama import Attend

logger = logging.getLogger(__name__)


class ConnectorSteps:
    """What a step owes its connector, in this order.

        begin     preempted blocks may be overwritten from here on; loads of the step start
        attend    before a layer attends, its loads have arrived; after it, what it wrote may be stored
        failures  rows whose load failed are errors, with the blocks that it left without valid KV
        finished  stores of the step are complete; transfers that have ended

    A load that fails, whether the connector tells or raises, is an error of its rows once the step has run to its end:
    other ranks count on its collectives from the vote on. Whether it ends a request is the scheduler's affair. An
    exception does not say whose load it was: that of the rows whose blocks are told beside it, or else of all that join
    in this step with tokens that they need not compute. Where there are none it ends the process, as any other does.
    """

    def __init__(self, connector: WorkerConnector, groups: Sequence[Sequence[Tensor]], block_size: int) -> None:
        """``groups``: the cache buffers of each group's layers, those of a drafter behind those of the model."""
        self._connector = connector
        self._layers = groups[0]
        self._block_size = block_size
        self._joined: frozenset[int] = frozenset()
        self._raised: Exception | None = None
        connector.register_kv_caches(groups)

    def begin(self, plan: StepPlan) -> float:
        """Execute the plan's metadata; seconds that it took, the whole of each synchronous load among them."""
        if plan.preempted:
            self._connector.handle_preemptions(plan.preempted)
        self._joined = frozenset()
        if plan.load_meta is None:
            return 0.0
        began = perf_counter()
        joined = {update.seq for update in plan.blocks if update.replace}
        self._joined = frozenset(row.seq for row in plan.rows if row.start and row.seq in joined)
        try:
            self._connector.start_load_kv(plan.load_meta)
        except Exception as error:
            self._note(error)
        return perf_counter() - began

    def _note(self, error: Exception) -> None:
        """Keep what was raised for `failures`; raise it again if no row joins that it could be the fault of."""
        if not self._joined:
            raise error
        if self._raised is None:  # else another layer of the same
            logger.error("the KV of a step could not be loaded", exc_info=error)
            self._raised = error

    def _arrive(self, layer: int) -> None:
        try:
            self._connector.wait_for_layer_load(layer)
        except Exception as error:
            self._note(error)

    def attend(self, inner: Attend) -> Attend:
        """``inner`` between the connector's layer-wise calls."""
        connector, layers = self._connector, self._layers

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._arrive(layer)
            out = inner(layer, q, k, v)
            connector.save_kv_layer(layer, layers[layer])
            return out

        return attend

    def before_layers(self) -> None:
        """What `attend` does before each layer, of all, where the layers are computed in one go."""
        for layer in range(len(self._layers)):
            self._arrive(layer)

    def after_layers(self) -> None:
        """What `attend` does after each layer, of all."""
        for layer, cache in enumerate(self._layers):
            self._connector.save_kv_layer(layer, cache)

    def failures(
        self, rows: Sequence[Row], states: Sequence[SequenceState]
    ) -> tuple[dict[int, str], dict[int, tuple[int, ...]]]:
        """Rows that read KV that was not loaded, by index: what to tell people, and which blocks (see `StepResult`)."""
        bad = self._connector.get_block_ids_with_load_errors()
        raised, self._raised = self._raised, None
        if not bad and raised is None:
            return {}, {}
        why = "" if raised is None else f": {type(raised).__name__}: {raised}"
        lost: dict[int, tuple[int, ...]] = {}
        for i, (row, state) in enumerate(zip(rows, states, strict=True)):
            read = state.table[: -(-(row.start + row.n) // self._block_size)].tolist()
            if blocks := bad.intersection(read):
                lost[i] = tuple(sorted(blocks))
        if lost:
            what = {i: f"blocks {', '.join(map(str, blocks))}" for i, blocks in lost.items()}
        else:
            lost = {i: () for i, row in enumerate(rows) if row.seq in self._joined} if raised is not None else {}
            what = dict.fromkeys(lost, "this request")
        return {i: f"the KV of {of} could not be loaded{why}" for i, of in what.items()}, lost

    def finished(self) -> Sequence[TransferEvent]:
        """Wait for the step's stores; the transfers that have ended since the last call."""
        self._connector.wait_for_save()
        return self._connector.get_finished()

    def shutdown(self) -> None:
        self._connector.shutdown()
