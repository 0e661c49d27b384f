# SPDX-License-Identifier: Apache-2.0
"""The load of a benchmark: who asks when, for how much. One generator for real and simulated runs.

Lengths, offsets and arrival times are, number for number, those of ``vllm bench serve --dataset-name random`` with
the same options and seed and a tokenizer without special tokens, so that a simulated run and a measured one send
the same requests at the same times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from numpy.random import Generator, RandomState, SeedSequence, default_rng

from paceline.core.config import require, require_choice, require_int
from paceline.core.request import GeneratedTokens, TokenSource, ids_key

Dataset = Literal["random"]

WARMUP_STREAM = 1
"""Spawn key that separates the warm-ups' random numbers from the measured requests'."""


def _require_positive(value: object, field: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    require(number and float(value) > 0, field, f"must be a number above 0 (inf is allowed), got {value!r}")  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a benchmark client sends; names follow the options of ``vllm bench serve``.

    ``input_len`` and ``output_len`` are in tokens, before ``range_ratio`` r spreads them uniformly over
    [floor(L (1 - r)), ceil(L (1 + r))]; ``input_range_ratio`` and ``output_range_ratio`` override it for one side.
    ``prefix_len`` tokens in front are the same in every request. ``request_rate`` is in requests per second (inf:
    everything at once); ``burstiness`` b shapes the gamma-distributed gaps (1: Poisson, inf: even gaps).
    ``max_concurrency`` bounds the requests in flight (None: no bound). ``num_warmups`` requests of their own are sent
    and finished before the measured ones start.
    """

    dataset: Dataset = "random"
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    input_range_ratio: float | None = None
    output_range_ratio: float | None = None
    prefix_len: int = 0
    vocab_size: int = 32000
    num_prompts: int = 1000
    num_warmups: int = 0
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ignore_eos: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        require_choice(self.dataset, ("random",), "workload.dataset")
        require_int(self.input_len, 0, "workload.input_len")
        require_int(self.output_len, 1, "workload.output_len")
        require_int(self.prefix_len, 0, "workload.prefix_len")
        require_int(self.vocab_size, 2, "workload.vocab_size")
        require_int(self.num_prompts, 1, "workload.num_prompts")
        require_int(self.num_warmups, 0, "workload.num_warmups")
        require_int(self.seed, 0, "workload.seed")
        require(self.seed < 2**32, "workload.seed", f"must be below 2**32, got {self.seed}")
        for name in ("range_ratio", "input_range_ratio", "output_range_ratio"):
            ratio = getattr(self, name)
            require(ratio is None or 0.0 <= ratio < 1.0, f"workload.{name}", f"must lie in [0, 1), got {ratio!r}")
        _require_positive(self.request_rate, "workload.request_rate")
        _require_positive(self.burstiness, "workload.burstiness")
        if self.max_concurrency is not None:
            require_int(self.max_concurrency, 1, "workload.max_concurrency")
        require(isinstance(self.ignore_eos, bool), "workload.ignore_eos", "must be a boolean")
        shortest = self.prefix_len + self.input_bounds[0]
        require(shortest >= 1, "workload.input_len", "with prefix_len and range_ratio a prompt could be empty")

    @property
    def input_bounds(self) -> tuple[int, int]:
        """Least and greatest number of prompt tokens after the shared prefix."""
        return _bounds(self.input_len, _first(self.input_range_ratio, self.range_ratio), least=0)

    @property
    def output_bounds(self) -> tuple[int, int]:
        """Least and greatest number of output tokens; at least 1."""
        return _bounds(self.output_len, _first(self.output_range_ratio, self.range_ratio), least=1)

    @property
    def longest(self) -> int:
        """Tokens of the longest request that can be drawn: prefix, input and output."""
        return self.prefix_len + self.input_bounds[1] + self.output_bounds[1]


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a load: ``arrival_s`` counts from the start of the run, lengths are in tokens.

    The prompt is ``prefix`` and then ``input_len`` ids that count up from ``offset + index``.
    """

    index: int
    arrival_s: float
    input_len: int
    output_len: int
    offset: int
    prefix: tuple[int, ...] = ()

    @property
    def prompt_len(self) -> int:
        return len(self.prefix) + self.input_len

    def source(self, vocab_size: int) -> TokenSource:
        """The prompt as a token source, id of position i after the prefix: (offset + index + i) mod vocabulary."""
        body = GeneratedTokens(self.input_len, self.offset + self.index, vocab_size)
        return PrefixedTokens(self.prefix, body) if self.prefix else body


class PrefixedTokens:
    """A synthetic prompt behind stored ids that it shares with others."""

    __slots__ = ("body", "length", "prefix")

    def __init__(self, prefix: tuple[int, ...], body: GeneratedTokens) -> None:
        self.prefix = prefix
        self.body = body
        self.length = len(prefix) + body.length

    def tokens(self, start: int, stop: int) -> Sequence[int]:
        p = len(self.prefix)
        ids = list(self.prefix[start:stop])
        if stop > p:
            ids += self.body.tokens(max(0, start - p), stop - p)
        return ids

    def block_key(self, index: int, block_size: int) -> bytes:
        start = index * block_size
        if start < len(self.prefix):
            return ids_key(self.tokens(start, start + block_size))
        body = self.body
        rest = GeneratedTokens(body.length, body.offset + start - len(self.prefix), body.vocab_size)
        return rest.block_key(0, block_size)


def generate(workload: Workload) -> list[Job]:
    """The measured requests in order of arrival.

    Lengths and offsets come from ``numpy.random.default_rng(seed)`` in the order inputs, outputs, offsets, prefix;
    arrivals from numpy's legacy generator with the same seed.
    """
    rng = default_rng(workload.seed)
    inputs, outputs, offsets, prefix = _draw(rng, workload, workload.num_prompts)
    arrivals = arrival_times(workload)
    return [Job(i, arrivals[i], inputs[i], outputs[i], offsets[i], prefix) for i in range(workload.num_prompts)]


def generate_warmups(workload: Workload) -> list[Job]:
    """The warm-up requests, all due at once, before the measured run starts.

    Their lengths follow the same distribution. Each prompt begins with one id twice, which neither an ascending
    prompt nor (by the choice of that id) the shared prefix does, so that the prefix cache holds nothing of the
    measured requests.
    """
    rng = default_rng(SeedSequence(workload.seed, spawn_key=(WARMUP_STREAM,)))
    inputs, outputs, offsets, _ = _draw(rng, workload, workload.num_warmups)
    taken = shared_prefix(workload)[:1]
    jobs = []
    for i, (input_len, offset) in enumerate(zip(inputs, offsets, strict=True)):
        length = workload.prefix_len + input_len
        first = offset if offset not in taken else (offset + 1) % workload.vocab_size
        marker = (first,) * min(2, length)
        jobs.append(Job(i, 0.0, length - len(marker), outputs[i], offset, marker))
    return jobs


def shared_prefix(workload: Workload) -> tuple[int, ...]:
    """The ``prefix_len`` ids in front of every measured prompt."""
    return _draw(default_rng(workload.seed), workload, workload.num_prompts)[3]


def arrival_times(workload: Workload) -> list[float]:
    """Seconds from the start of the run to each request: gamma gaps, rescaled to end at num_prompts / request_rate."""
    n, rate, b = workload.num_prompts, workload.request_rate, workload.burstiness
    if math.isinf(rate):
        return [0.0] * n
    gaps = [1.0 / rate] * n
    if not math.isinf(b):
        gaps = RandomState(workload.seed).gamma(shape=b, scale=1.0 / (rate * b), size=n).tolist()
    times, total = [], 0.0
    for gap in gaps:
        total += gap
        times.append(total)
    if total == 0.0:
        return times
    scale = (n / rate) / total
    return [t * scale for t in times]


def _draw(rng: Generator, workload: Workload, count: int) -> tuple[list[int], list[int], list[int], tuple[int, ...]]:
    input_low, input_high = workload.input_bounds
    output_low, output_high = workload.output_bounds
    inputs = rng.integers(input_low, input_high + 1, size=count).tolist()
    outputs = rng.integers(output_low, output_high + 1, size=count).tolist()
    offsets = rng.integers(0, workload.vocab_size, size=count).tolist()
    prefix = rng.integers(0, workload.vocab_size, size=workload.prefix_len).tolist()
    return inputs, outputs, offsets, tuple(prefix)


def _first(value: float | None, default: float) -> float:
    return default if value is None else value


def _bounds(length: int, ratio: float, least: int) -> tuple[int, int]:
    """[floor(L (1 - r)), ceil(L (1 + r))] in floating point, as the reference client computes it."""
    return max(math.floor(length * (1 - ratio)), least), max(math.ceil(length * (1 + ratio)), least)
