# SPDX-License-Identifier: Apache-2.0
"""Capturing decode steps as CUDA graphs. Never run where there is no GPU; see docs/gpu.md for what was checked how."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.execution.decode_graphs import Replay
from paceline.execution.graph_step import Buffers

WARM_UPS = 2
"""Steps before a capture: libraries take their workspaces, collectives connect, and kernels are chosen."""


class CudaRecorder:
    """See `decode_graphs.Recorder`. All graphs share one memory pool: they are never replayed at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # Graphs that share a pool are captured on one stream.
        self._stream = torch.cuda.Stream(device)

    def __call__(self, step: Callable[[Buffers], None], buffers: Buffers) -> Replay:
        """Warm up on a stream of its own, then capture."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                step(buffers)
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use CUDA meanwhile: NCCL has one that watches its operations.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            step(buffers)
        replay: Replay = graph.replay
        return replay
