# SPDX-License-Identifier: Apache-2.0
"""Choosing tokens: greedy, or from a distribution with random numbers that depend on the request alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from paceline.core.request import SamplingParams
from paceline.execution.kvcache import Array

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


def uniforms(seeds: Sequence[int], positions: Array, purpose: Purpose) -> Array:
    """`uniform` for many: float64 [rows, numbers] of ``positions`` [rows, numbers], each row with its own seed."""
    with np.errstate(over="ignore"):
        states = _steps(np.zeros(len(seeds), dtype=np.uint64), np.array([s & _MASK for s in seeds], dtype=np.uint64))
        states = _steps(states[:, None], positions.astype(np.uint64))
        states = _steps(states, np.array(int(purpose), dtype=np.uint64))
    return (states >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _steps(states: Array, values: Array) -> Array:
    """`_step` of arrays, uint64, whose products and sums wrap around."""
    x = (states ^ values) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def probabilities(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Softmax of ``logits`` [rows, vocabulary] at each row's temperature (> 0), float32."""
    shifted = logits - logits.amax(-1, keepdim=True)
    divisors = torch.tensor(temperatures, dtype=logits.dtype, device=logits.device)
    return torch.softmax(shifted / divisors[:, None], -1)


@dataclass(frozen=True, slots=True)
class Filters:
    """What of a request's distribution is kept; `of` gives None for a request that keeps all of it.

    Applied in the order of the fields, each to what is left, normalised: tokens at least ``min_p`` times as likely as
    the likeliest; the ``top_k`` likeliest; the likeliest that together have probability ``top_p`` (nucleus sampling,
    Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020). Tokens as likely as the last one kept are
    kept too, so that the choice does not depend on the order in which equals are found.
    """

    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @staticmethod
    def of(params: SamplingParams) -> Filters | None:
        """None where nothing is cut: the defaults, or greedy decoding, whose choice is the same in any case."""
        top_k = max(params.top_k, 0)
        if params.temperature == 0.0 or (params.min_p == 0.0 and top_k == 0 and params.top_p == 1.0):
            return None
        return Filters(params.min_p, top_k, params.top_p)


NUCLEUS_GUESS = 256
"""How many of the likeliest tokens are sorted first; a nucleus that is larger costs a sort of the vocabulary."""


def filtered(p: Tensor, filters: Sequence[Filters]) -> Tensor:
    """Distributions ``p`` [rows, vocabulary] cut by each row's filters, and normalised again."""
    vocabulary = p.shape[-1]
    min_p = torch.tensor([f.min_p for f in filters], dtype=p.dtype, device=p.device)[:, None]
    p = p.where(p >= min_p * p.amax(-1, keepdim=True), 0.0)
    for i, f in enumerate(filters):
        if 0 < f.top_k < vocabulary:
            p[i][p[i] < p[i].topk(f.top_k).values[-1]] = 0.0
    for i, f in enumerate(filters):
        if f.top_p < 1.0:
            p[i][p[i] < _nucleus_edge(p[i], f.top_p)] = 0.0
    # In float64, so that the rounding of the sum does not depend on how many rows are summed at once.
    return p / p.sum(-1, keepdim=True, dtype=torch.float64).to(p.dtype)


def _nucleus_edge(p: Tensor, top_p: float) -> Tensor:
    """Probability of the last token of the smallest set of likeliest tokens that has ``top_p`` of the sum of ``p``."""
    target = top_p * p.sum(dtype=torch.float64)
    best = p.topk(min(NUCLEUS_GUESS, len(p))).values
    reached = best.cumsum(0, dtype=torch.float64) >= target
    if not reached[-1]:
        best = _descending(p)
        reached = best.cumsum(0, dtype=torch.float64) >= target
    return best[int(reached.int().argmax())] if reached[-1] else best[-1]


def _descending(p: Tensor) -> Tensor:
    """``p`` [vocabulary], sorted. numpy sorts floats several times as fast as torch on CPUs."""
    if p.device.type != "cpu":
        return p.sort(descending=True).values
    return torch.from_numpy(np.sort(p.numpy())[::-1].copy())


def draw(weights: Tensor, numbers: Sequence[float]) -> list[int]:
    """One index per row of ``weights`` [rows, vocabulary] (not necessarily normalised) by inverse transform.

    An index of weight 0 is never drawn.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    # u < 1, but its product with the sum may round up to the sum, past the last index.
    drawn_at = torch.tensor(numbers, dtype=torch.float64, device=total.device) * total
    targets = torch.minimum(drawn_at, total.nextafter(total.new_zeros(())))
    drawn: list[int] = torch.searchsorted(cumulative, targets[:, None], right=True)[:, 0].tolist()
    return drawn
