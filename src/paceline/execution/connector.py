# SPDX-License-Identifier: Apache-2.0
"""The worker half of a KV connector, called at its places in a step."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from torch import Tensor

from paceline.core.connector import WorkerConnector
from paceline.core.plan import Row, StepPlan, TransferEvent
from paceline.execution.sequence import SequenceState
from paceline.models.llama import Attend


class ConnectorSteps:
    """What a step owes its connector, in this order.

        begin     preempted blocks may be overwritten from here on; loads of the step start
        attend    before a layer attends, its loads have arrived; after it, what it wrote may be stored
        failures  blocks that a load left without valid KV are errors of the rows that read them
        finished  stores of the step are complete; transfers that have ended

    A load that fails is told by the connector, not raised: the step runs to its end, and so do its collectives.
    """

    def __init__(self, connector: WorkerConnector, groups: Sequence[Sequence[Tensor]], block_size: int) -> None:
        """``groups``: the cache buffers of each group's layers, those of a drafter behind those of the model."""
        self._connector = connector
        self._layers = groups[0]
        self._block_size = block_size
        connector.register_kv_caches(groups)

    def begin(self, plan: StepPlan) -> float:
        """Execute the plan's metadata; seconds that it took, the whole of each synchronous load among them."""
        if plan.preempted:
            self._connector.handle_preemptions(plan.preempted)
        if plan.load_meta is None:
            return 0.0
        began = perf_counter()
        self._connector.start_load_kv(plan.load_meta)
        return perf_counter() - began

    def attend(self, inner: Attend) -> Attend:
        """``inner`` between the connector's layer-wise calls."""
        connector, layers = self._connector, self._layers

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            connector.wait_for_layer_load(layer)
            out = inner(layer, q, k, v)
            connector.save_kv_layer(layer, layers[layer])
            return out

        return attend

    def failures(self, rows: Sequence[Row], states: Sequence[SequenceState]) -> dict[int, str]:
        """Rows that read a block without valid KV, by index, and what to tell people."""
        bad = self._connector.get_block_ids_with_load_errors()
        if not bad:
            return {}
        errors = {}
        for i, (row, state) in enumerate(zip(rows, states, strict=True)):
            read = state.table[: -(-(row.start + row.n) // self._block_size)].tolist()
            if lost := sorted(bad.intersection(read)):
                errors[i] = f"the KV of blocks {', '.join(map(str, lost))} could not be loaded"
        return errors

    def finished(self) -> Sequence[TransferEvent]:
        """Wait for the step's stores; the transfers that have ended since the last call."""
        self._connector.wait_for_save()
        return self._connector.get_finished()

    def shutdown(self) -> None:
        self._connector.shutdown()
