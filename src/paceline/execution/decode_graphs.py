# SPDX-License-Identifier: Apache-2.0
"""FULL decode steps by captured graphs: fill the buffers, replay, read the verdicts.

A graph is captured for each number of rows and each length of block tables, the largest first, since all share one
memory pool. How a step is captured is left to a `Recorder`; `cuda_recorder` has the one for GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.execution.batch import Batch
from paceline.execution.connector import ConnectorSteps
from paceline.execution.full import Computed, Verdict
from paceline.execution.graph_step import Buffers, GraphStep, Inputs, StepShape
from paceline.execution.kvcache import Array, KVCache
from paceline.execution.sampler import Purpose, uniforms
from paceline.models.llama import Llama, Taps

Replay = Callable[[], None]

Recorder = Callable[[Callable[[Buffers], None], Buffers], Replay]
"""Captures a step over buffers, which hold inert rows then; what it returns computes whatever they hold when called."""

LEAST_TOKENS = 256
"""The shortest block tables hold so many tokens; each further length is twice the one before."""


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """Steps that are captured: of ``sizes`` tokens, in rows of ``width``, with tables of ``blocks`` blocks.

    ``taps``: see `Taps`. ``rates``: of synthetic verification, see `rejection.verify`.
    """

    sizes: Sequence[int]
    width: int
    blocks: Sequence[int]
    taps: tuple[int, ...] = ()
    rates: Sequence[float] | None = None


def table_lengths(max_model_len: int, width: int, block_size: int) -> tuple[int, ...]:
    """Lengths of block tables, in blocks: powers of two times the first; the last holds every row of W tokens.

    >>> table_lengths(2048, 4, 16)
    (16, 32, 64, 128, 129)
    """
    most = -(-(max_model_len + width) // block_size)
    lengths, length = [], -(-max(LEAST_TOKENS, width) // block_size)
    while length < most:
        lengths.append(length)
        length *= 2
    return (*lengths, most)


class DecodeGraphs:
    """See `full.FullSteps`. Rows that it was not captured for, a longer block table among them, it leaves alone."""

    def __init__(self, model: Llama, cache: KVCache, limits: GraphLimits, record: Recorder) -> None:
        """Capture every graph. Ranks that share experts do so together, since a capture is preceded by real steps."""
        self._limits = limits
        self._block_size = cache.block_size
        self._shared = model.exchange is not None
        self._lengths = sorted(limits.blocks)
        sizes = sorted(limits.sizes, reverse=True)
        width = limits.width
        largest = StepShape(sizes[0] // width, width, self._lengths[-1])
        with torch.inference_mode():
            self._buffers = Buffers.make(model, largest, len(limits.taps))
            step = GraphStep(model, cache, limits.taps, limits.rates)
            self._graphs: dict[tuple[int, int], Replay] = {}
            for size in sizes:
                for length in reversed(self._lengths):
                    shape = StepShape(size // width, width, length)
                    self._graphs[shape.rows, length] = self._capture(step, shape, record)
        self._staging = _Staging(largest.words, self._buffers.packed)
        self._views: dict[StepShape, Inputs] = {}

    def _capture(self, step: GraphStep, shape: StepShape, record: Recorder) -> Replay:
        return record(lambda buffers: step(shape, buffers), self._buffers)

    def forward(self, batch: Batch, size: int, taps: Taps | None, connector: ConnectorSteps | None) -> Computed | None:
        """See `FullSteps.forward`."""
        shape = self._fitting(batch, size)
        if shape is None or (taps is not None and taps.layers != self._limits.taps):
            return None
        self._fill(shape, batch)
        if connector is not None:
            connector.before_layers()
        self._replay(shape)
        if connector is not None:
            connector.after_layers()
        count, buffers = len(batch.tokens), self._buffers
        if taps is not None:
            taps.states.extend(buffers.tapped[:, :count])
        verdicts = [
            Verdict(accepted, token, bool(finite), bool(sound))
            for accepted, token, finite, sound in buffers.verdicts[: len(batch.rows)].tolist()
        ]
        return Computed(buffers.hidden[:count], buffers.logits[:count], verdicts)

    def idle(self, size: int) -> None:
        """See `FullSteps.idle`: every row is inert, in the shortest tables."""
        if self._shared:
            shape = StepShape(size // self._limits.width, self._limits.width, self._lengths[0])
            self._staging.cleared(shape.words)
            self._replay(shape)

    def _fitting(self, batch: Batch, size: int) -> StepShape | None:
        """The captured shape for this step; None if there is none."""
        width, block_size = self._limits.width, self._block_size
        longest = 0
        for span, row in zip(batch.spans, batch.rows, strict=True):
            used = -(-(span.start + span.n) // block_size)
            if span.n != width or len(row.drafts) != width - 1 or not row.samples or used > len(span.table):
                return None
            longest = max(longest, used)
        length = next((length for length in self._lengths if length >= longest), None)
        rows = size // width
        if length is None or len(batch.rows) > rows or (rows, length) not in self._graphs:
            return None
        return StepShape(rows, width, length)

    def _fill(self, shape: StepShape, batch: Batch) -> None:
        """Pack the step; what is not of one of its rows is zero."""
        packed = self._staging.cleared(shape.words)
        views = self._views.get(shape)
        if views is None:
            views = self._views[shape] = shape.split(packed)
        count = len(batch.rows)
        views.tokens[: len(batch.tokens)] = batch.tokens
        views.live[:count] = 1
        for i, (span, row) in enumerate(zip(batch.spans, batch.rows, strict=True)):
            used = -(-(span.start + span.n) // self._block_size)
            views.starts[i] = span.start
            views.tables[i, :used] = span.table[:used]
            views.drafts[i] = row.drafts
        if self._limits.rates is not None:
            positions = np.array([state.num_output for state in batch.states])[:, None] + np.arange(shape.width - 1)
            numbers = uniforms([state.seed for state in batch.states], positions, Purpose.ACCEPT)
            views.numbers[:count] = numbers.view(np.int64)

    def _replay(self, shape: StepShape) -> None:
        self._staging.send(shape.words)
        self._graphs[shape.rows, shape.blocks]()


class _Staging:
    """The packed input in main memory, from where it goes to the device."""

    def __init__(self, words: int, target: Tensor) -> None:
        self._target = target
        on_gpu = target.device.type == "cuda"
        # Page-locked, so that the host need not wait for the copy.
        self._host = torch.zeros(words, dtype=torch.int64, pin_memory=on_gpu)
        self._packed = self._host.numpy()
        self._sent = torch.cuda.Event() if on_gpu else None

    def cleared(self, words: int) -> Array:
        """Zeros, int64 [words], to be filled and sent."""
        if self._sent is not None:
            # A step without rows reads no result, so its input may still be waiting for the device.
            self._sent.synchronize()
        packed = self._packed[:words]
        packed[:] = 0
        return packed

    def send(self, words: int) -> None:
        self._target[:words].copy_(self._host[:words], non_blocking=True)
        if self._sent is not None:
            self._sent.record()
