# SPDX-License-Identifier: Apache-2.0
"""An exchange of tokens with everything settled that no value decides: what a decode graph captures of it, on CPUs.

Arrays go in and come out. An exchange may have a planned form of its own (`PlansExchange`); any other is given one.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from paceline.models.experts import ExpertExchange, Placement, Routed
from paceline.models.kernels import Array

Tokens = tuple[Array, Array, Array]
"""Hidden states [tokens, hidden_size] float32, experts [tokens, top_k] int64 and their weights [tokens, top_k] float32,
as in `Routed`."""


class PlannedExchange(Protocol):
    """See `ExpertExchange`; what comes out is overwritten by the next call."""

    def dispatch(self, tokens: Tokens) -> Tokens: ...

    def combine(self, partial: Array) -> Array:
        """Sums [tokens, hidden_size] float32 in, those of this rank's own tokens out."""
        ...


@runtime_checkable
class PlansExchange(Protocol):
    """An exchange that has a planned form."""

    def plan(self, tokens: int, hidden_size: int, placement: Placement, top_k: int) -> PlannedExchange:
        """For passes of at most ``tokens`` tokens a rank; its terms are those of this exchange's `begin`."""
        ...


class ByTensors:
    """The planned form of an exchange that has none."""

    def __init__(self, exchange: ExpertExchange, placement: Placement) -> None:
        self._exchange = exchange
        self._placement = placement

    def dispatch(self, tokens: Tokens) -> Tokens:
        """See `PlannedExchange`."""
        arrived = self._exchange.dispatch(Routed(*map(torch.from_numpy, tokens)), self._placement)
        parts = (arrived.hidden, arrived.experts, arrived.weights)
        hidden, experts, weights = (part.contiguous().numpy() for part in parts)
        return hidden, experts, weights

    def combine(self, partial: Array) -> Array:
        """See `PlannedExchange`."""
        out: Array = self._exchange.combine(torch.from_numpy(partial)).contiguous().numpy()
        return out


def planned(
    exchange: ExpertExchange, tokens: int, hidden_size: int, placement: Placement, top_k: int
) -> PlannedExchange:
    """The planned form of ``exchange``, for at most ``tokens`` tokens a rank."""
    if isinstance(exchange, PlansExchange):
        return exchange.plan(tokens, hidden_size, placement, top_k)
    return ByTensors(exchange, placement)
