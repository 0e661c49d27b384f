# SPDX-License-Identifier: Apache-2.0
"""Choosing tokens: greedy, or by temperature with random numbers that depend on the request alone."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

_MASK = 2**64 - 1


class Purpose(IntEnum):
    """What a random number decides; two purposes at one position draw independent numbers."""

    ACCEPT = 1
    SAMPLE = 2


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection of 64-bit integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def _step(state: int, value: int) -> int:
    return _mix((state ^ (value & _MASK)) + 0x9E3779B97F4A7C15 & _MASK)


def derived_seed(executor_seed: int, seq: int) -> int:
    """Seed of a request that brings none: its own for each sequence of an executor."""
    return _step(_step(_step(0, executor_seed), seq), 0x5EED)


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """A number in [0, 1) that depends on nothing but its arguments.

    ``position`` counts output tokens. Because no generator is advanced, the numbers of a request do not depend on
    who shares its batch, on how its prompt was cut into chunks, or on whether it was preempted.
    """
    return (_step(_step(_step(0, seed), position), purpose) >> 11) * 2.0**-53


def probabilities(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Softmax of ``logits`` [rows, vocabulary] at each row's temperature (> 0), float32."""
    shifted = logits - logits.amax(-1, keepdim=True)
    return torch.softmax(shifted / torch.tensor(temperatures, dtype=logits.dtype)[:, None], -1)


def draw(weights: Tensor, numbers: Sequence[float]) -> list[int]:
    """One index per row of ``weights`` [rows, vocabulary] (not necessarily normalised) by inverse transform.

    An index of weight 0 is never drawn.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    # u < 1, but its product with the sum may round up to the sum, past the last index.
    targets = torch.minimum(torch.tensor(numbers, dtype=torch.float64) * total, total.nextafter(total.new_zeros(())))
    drawn: list[int] = torch.searchsorted(cumulative, targets[:, None], right=True)[:, 0].tolist()
    return drawn
