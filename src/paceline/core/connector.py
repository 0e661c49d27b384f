# SPDX-License-Identifier: Apache-2.0
"""The two halves of a KV connector, as protocols: one decides beside the scheduler, one moves bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from paceline.core.plan import StepPlan, TransferEvent
from paceline.core.request import Request


class SchedulerConnector(Protocol):
    """The scheduler's half; torch-free. Method names follow vLLM's KVConnectorBase_V1."""

    def get_num_new_matched_tokens(self, request: Request, num_computed: int) -> tuple[int | None, bool]:
        """Tokens it can provide beyond ``num_computed`` (block-aligned), and whether asynchronously.

        None: not known yet, ask again later. No side effects; it may be asked repeatedly.
        """
        ...

    def update_state_after_alloc(self, request: Request, blocks: Sequence[Sequence[int]], num_external: int) -> None:
        """``request`` now holds ``blocks`` (one table per group); ``num_external`` tokens are to be loaded."""
        ...

    def build_connector_meta(self, plan: StepPlan) -> Any:
        """What the worker half must do in the step of ``plan``; opaque to everyone else."""
        ...

    def request_finished(self, request: Request, blocks: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Called exactly once. True: the connector still reads the blocks; free them at its ``saved`` event."""
        ...


class WorkerConnector(Protocol):
    """The worker's half: lives with the KV cache, never decides."""

    def register_kv_caches(self, caches: Sequence[Any]) -> None:
        """The cache buffers of each group, once, at start."""
        ...

    def start_load_kv(self, meta: Any) -> None:
        """Begin the loads of a step's metadata; synchronous ones are complete on return."""
        ...

    def wait_for_layer_load(self, layer: int) -> None:
        """Return when ``layer`` of the loads that this step reads has arrived."""
        ...

    def save_kv_layer(self, layer: int, cache: Any) -> None:
        """Store what the step wrote to ``layer``, if the metadata asks for it."""
        ...

    def wait_for_save(self) -> None:
        """Return when the step's blocks may be overwritten."""
        ...

    def get_finished(self) -> Sequence[TransferEvent]:
        """Transfers that ended since the last call, each exactly once."""
        ...

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        """Blocks whose synchronous load failed since the last call."""
        ...

    def handle_preemptions(self, seqs: Sequence[int]) -> None:
        """Called before the blocks of these sequences are overwritten."""
        ...

    def shutdown(self) -> None:
        """Release every resource."""
        ...
