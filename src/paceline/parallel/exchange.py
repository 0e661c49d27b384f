# SPDX-License-Identifier: Apache-2.0
"""The exchange of tokens among the experts of several ranks, by collectives of torch.distributed.

FULL: every rank sends all its tokens to all, in sizes that the agreement fixes, and no value of a tensor is read by the
host, so that a graph can capture it: two collectives a layer. NONE: tokens travel only to the ranks that hold an expert
they chose; how many is exchanged first: three collectives a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.graphs import FULL
from paceline.engine.line import PeerLost, by_a_peer
from paceline.models.experts import ExpertExchange, Placement, Routed
from paceline.parallel.board import map_shared
from paceline.parallel.roll import Roll, first_line
from paceline.parallel.shared import SharedExchange
from paceline.parallel.wire import Wire, pack, unpack

PASS = "pass"
"""Forward passes on the roll, draft passes among them, by their number."""


def connect(timeout_s: float, group: dist.ProcessGroup | None = None) -> ExpertExchange:
    """The fastest exchange among the ranks of ``group`` (None: all): every rank calls it, and all get the same kind.

    Ranks that compute on the CPUs of one host exchange through memory, and give up on a peer after ``timeout_s``
    seconds; others use the group's own collectives, whose timeout was set when the group was made.
    """
    if dist.get_world_size(group) > 1 and dist.get_backend(group) == "gloo":
        board = map_shared(timeout_s, group)
        if board is not None:
            return SharedExchange(board)
    return GroupExchange(group)


@dataclass(frozen=True, slots=True)
class _Uneven:
    """How tokens went out in NONE: ``rows`` of this rank, by destination; numbers of tokens sent and received."""

    rows: Tensor
    sent: list[int]
    received: list[int]


class GroupExchange:
    """Collectives of a process group: NCCL for tensors on CUDA devices, gloo on CPUs, across hosts too."""

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, gather: bool | None = None, roll: Roll | None = None
    ) -> None:
        """``gather``: FULL uses all_gather and reduce_scatter, otherwise all_to_all twice. ``roll``: tells who did not
        come in time to a pass.

        By default it gathers except with gloo, whose all_to_all takes a quarter of the time (measured with 4 to 64
        tokens on two ranks).
        """
        self.inert: Tensor | None = None
        self._group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self._gather = dist.get_backend(group) != "gloo" if gather is None else gather
        self._roll = roll
        self._passes = 0
        self._mode: int | None = None
        self._size = 0
        self._own = 0
        self._uneven: _Uneven | None = None
        self._buffers: dict[tuple[Any, ...], Tensor] = {}

    def begin(self, mode: int, size: int, inert: Tensor | None = None) -> None:
        """See `ExpertExchange`."""
        self._mode, self._size, self.inert = mode, size, inert
        self._passes += 1

    def dispatch(self, tokens: Routed, placement: Placement) -> Routed:
        """See `ExpertExchange`.

        Raises:
            RuntimeError: `begin` was not called.
            ValueError: more tokens than the size agreed on.
            PeerLost: a rank has died, or did not come in time.
        """
        if self._mode is None:
            raise RuntimeError("begin() must precede the first forward of a model whose experts several ranks share")
        self._own = len(tokens.hidden)
        with self._peers():
            if self._mode == FULL:
                return self._dispatch_fixed(tokens, placement.num_experts)
            return self._dispatch_uneven(tokens, placement)

    def combine(self, partial: Tensor) -> Tensor:
        """See `ExpertExchange`.

        Raises:
            PeerLost: a rank has died, or did not come in time.
        """
        with self._peers():
            if self._mode == FULL:
                return self._combine_fixed(partial)
            return self._combine_uneven(partial)

    @contextmanager
    def _peers(self) -> Iterator[None]:
        """A collective that fails is a peer's doing."""
        try:
            yield
        except RuntimeError as error:
            if not by_a_peer(error):
                raise
            reason = first_line(error)
            # A connection that ends before the deadline is that of a process that has died, of which others know more.
            if self._roll is not None and "imed out" in reason:
                reason += self._roll.absent(PASS, self._passes)
            raise PeerLost(f"an exchange of tokens did not complete: {reason}") from error

    def _dispatch_fixed(self, tokens: Routed, nobody: int) -> Routed:
        size, own = self._size, self._own
        if own > size:
            raise ValueError(f"{own} tokens on rank {self.rank}, but {size} were agreed on")
        wire = Wire.of(tokens)
        sent = self._buffer("sent", size, wire.row_bytes, torch.uint8, tokens.hidden.device)
        received = self._buffer("received", self.ranks * size, wire.row_bytes, torch.uint8, tokens.hidden.device)
        pack(tokens, wire.split(sent[:own]))
        wire.split(sent[own:])[2].fill_(nobody)
        if self._gather:
            dist.all_gather_single(received, sent, group=self._group)
        else:
            dist.all_to_all_single(received, sent.repeat(self.ranks, 1), group=self._group)
        return unpack(wire.split(received))

    def _combine_fixed(self, partial: Tensor) -> Tensor:
        size, width = self._size, partial.shape[1]
        if self._gather:
            out = self._buffer("reduced", size, width, partial.dtype, partial.device)
            dist.reduce_scatter_single(out, partial, group=self._group)
            return out[: self._own]
        parts = self._buffer("parts", self.ranks * size, width, partial.dtype, partial.device)
        dist.all_to_all_single(parts, partial, group=self._group)
        return parts.view(self.ranks, size, width)[:, : self._own].sum(0)

    def _dispatch_uneven(self, tokens: Routed, placement: Placement) -> Routed:
        device = tokens.hidden.device
        bounds = torch.tensor(placement.bounds(), device=device)
        # A choice of no expert lies past the last bound.
        owners = torch.bucketize(tokens.experts, bounds, right=True) - 1
        wanted = (owners == torch.arange(self.ranks, device=device)[:, None, None]).any(-1)
        sent = wanted.sum(1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        rows = wanted.nonzero()[:, 1]
        self._uneven = way = _Uneven(rows, sent.tolist(), received.tolist())
        wire = Wire.of(tokens)
        outgoing = torch.empty(len(rows), wire.row_bytes, dtype=torch.uint8, device=device)
        pack(Routed(tokens.hidden[rows], tokens.experts[rows], tokens.weights[rows]), wire.split(outgoing))
        incoming = torch.empty(sum(way.received), wire.row_bytes, dtype=torch.uint8, device=device)
        dist.all_to_all_single(incoming, outgoing, way.received, way.sent, group=self._group)
        return unpack(wire.split(incoming))

    def _combine_uneven(self, partial: Tensor) -> Tensor:
        way = self._uneven
        assert way is not None
        width = partial.shape[1]
        returned = torch.empty(len(way.rows), width, dtype=partial.dtype, device=partial.device)
        dist.all_to_all_single(returned, partial, way.sent, way.received, group=self._group)
        out = torch.zeros(self._own, width, dtype=torch.float32, device=partial.device)
        # One rank after the other: a row occurs once in each part, so that sums have an order.
        for rows, part in zip(way.rows.split(way.sent), returned.split(way.sent), strict=True):
            out.index_add_(0, rows, part.float())
        return out.to(partial.dtype)

    def _buffer(self, use: str, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer that stays where it is, as a captured graph needs it."""
        key = (use, rows, width, dtype, device)
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(rows, width, dtype=dtype, device=device)
        return self._buffers[key]
