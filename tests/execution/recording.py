# SPDX-License-Identifier: Apache-2.0
"""Decode graphs without a GPU: a step is traced once by torch.fx, and what was traced is replayed on its buffers.

A trace holds what a CUDA graph would: the operations, with the shapes they had then and the memory they read. A value
that the host reads while the step is traced is an error, and so is an operation whose shape depends on one; memory that
is neither a buffer, the cache nor a weight is found in the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.execution.decode_graphs import Replay
from paceline.execution.graph_step import Buffers

DYNAMIC = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class HostRead(RuntimeError):
    """A step did what cannot be captured."""


class _NoHostReads(TorchDispatchMode):
    """Refuses operations that give the host a value, or a shape that depends on one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_place = func is torch.ops.aten.index.Tensor and not any(
            i.dtype == torch.bool for i in args[1] if i is not None
        )
        if any(tag in DYNAMIC for tag in func.tags) and not by_place:
            raise HostRead(f"{func} cannot be captured")
        return func(*args, **(kwargs or {}))


class Repeating:
    """A `decode_graphs.Recorder` that runs the step itself, and refuses what cannot be captured, each time.

    For steps with collectives, which torch.fx does not replay.
    """

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, step: Callable[[Buffers], None], buffers: Buffers) -> Replay:
        step(buffers)

        def replay() -> None:
            self.replays += 1
            with _NoHostReads():
                step(buffers)

        return replay


class Recording:
    """See `decode_graphs.Recorder`. ``captured``: the graphs; ``replays``: how many times one of them has run."""

    def __init__(self, *known: Tensor) -> None:
        """``known``: memory that a graph may use besides the buffers."""
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.replays = 0
        self.captured: list[torch.fx.GraphModule] = []

    def __call__(self, step: Callable[[Buffers], None], buffers: Buffers) -> Replay:
        step(buffers)
        with _NoHostReads():
            traced = make_fx(lambda *tensors: step(Buffers(*tensors)))(*buffers)
        self.captured.append(traced)

        def replay() -> None:
            self.replays += 1
            traced(*buffers)

        return replay

    def foreign(self) -> Iterator[Tensor]:
        """Tensors that graphs have kept and that are not known."""
        for traced in self.captured:
            for node in traced.graph.nodes:
                if node.op == "get_attr":
                    tensor = getattr(traced, node.target)
                    if tensor.numel() and tensor.untyped_storage().data_ptr() not in self.known:
                        yield tensor
