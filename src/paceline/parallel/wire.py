# SPDX-License-Identifier: Apache-2.0
"""Routed tokens as rows of bytes, so that hidden states and their routing travel together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.models.experts import Routed

Views = tuple[Tensor, Tensor, Tensor]
"""Hidden states [tokens, hidden_size], weights and experts [tokens, top_k]."""

_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Wire:
    """A row: the hidden state in ``dtype``, then top_k weights (float32), then top_k experts (int32), padded."""

    hidden_size: int
    dtype: torch.dtype
    top_k: int

    @classmethod
    def of(cls, tokens: Routed) -> Wire:
        """The format of ``tokens``."""
        return cls(tokens.hidden.shape[1], tokens.hidden.dtype, tokens.experts.shape[1])

    @property
    def row_bytes(self) -> int:
        return -(-(self._hidden_bytes + 8 * self.top_k) // _ALIGNMENT) * _ALIGNMENT

    @property
    def _hidden_bytes(self) -> int:
        return -(-self.hidden_size * self.dtype.itemsize // 4) * 4

    def split(self, rows: Tensor) -> Views:
        """Hidden states, weights and experts (int32) that lie in ``rows``, uint8 [tokens, row_bytes], as views."""
        weights = self._hidden_bytes
        experts = weights + 4 * self.top_k
        return (
            rows[:, : self.hidden_size * self.dtype.itemsize].view(self.dtype),
            rows[:, weights:experts].view(torch.float32),
            rows[:, experts : experts + 4 * self.top_k].view(torch.int32),
        )


def pack(tokens: Routed, views: Views) -> None:
    """Write ``tokens`` where ``views`` lie."""
    for view, values in zip(views, (tokens.hidden, tokens.weights, tokens.experts), strict=True):
        view.copy_(values)


def unpack(views: Views) -> Routed:
    """The tokens in ``views``; hidden states and weights stay where they lie."""
    hidden, weights, experts = views
    return Routed(hidden, experts.to(torch.int64), weights)
