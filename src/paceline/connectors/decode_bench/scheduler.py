# SPDX-License-Identifier: Apache-2.0
"""Scheduler half of DecodeBench: pretends that a prefill side has delivered every prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from paceline.core.kv.pool import NULL_BLOCK
from paceline.core.plan import StepPlan
from paceline.core.request import Request


class Fill(msgspec.Struct, frozen=True):
    """Blocks of one request to fill, per cache group, and how many tokens they stand for."""

    seq: int
    blocks: tuple[tuple[int, ...], ...]
    tokens: int


class DecodeBenchScheduler:
    """Synchronously matches all but the last token of a request, so that it decodes from its first step.

    A preempted request is filled again. Filled blocks are floor(local / block_size) up to but not including
    ceil((num_tokens - 1) / block_size): never a block of the local prefix.
    """

    refills_after_preemption = True

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._fills: list[Fill] = []

    def get_num_new_matched_tokens(self, request: Request, num_computed: int) -> tuple[int, bool]:
        """Everything beyond ``num_computed`` but the last token, at once."""
        return max(0, request.num_tokens - num_computed - 1), False

    def update_state_after_alloc(self, request: Request, blocks: Sequence[Sequence[int]], num_external: int) -> None:
        """Remember which blocks to fill in this step."""
        if not num_external:
            return
        total = request.num_tokens - 1
        first = (total - num_external) // self.block_size
        last = -(-total // self.block_size)
        filled = tuple(tuple(b for b in table[first:last] if b != NULL_BLOCK) for table in blocks)
        self._fills.append(Fill(request.seq, filled, num_external))

    def build_connector_meta(self, plan: StepPlan) -> list[Fill] | None:
        """The fills of this step, None if there are none."""
        if not self._fills:
            return None
        fills, self._fills = self._fills, []
        return fills

    def request_finished(self, request: Request, blocks: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Nothing to wait for."""
        return False, None
