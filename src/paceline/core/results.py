# SPDX-License-Identifier: Apache-2.0
"""Latencies of a run: one record per request, percentiles over all, and the result file of a benchmark.

TTFT: first chunk minus send. ITL: gap between successive chunks of a stream; with speculation a chunk may carry
several tokens, so it is a time per *chunk*. TPOT: (last chunk - first chunk) / (tokens - 1). E2EL: last chunk minus
send. All of them are measured at the client and leave out the time a request waits for the client's own concurrency
limit, which is reported as queue time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.config import require

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.5, 99.9)
METRICS = {
    "ttft": "ttft",
    "tpot": "tpot",
    "itl": "itl",
    "e2el": "e2el",
    "client_queue_time": "queue",
    "e2el_including_client_queue": "e2el_with_queue",
}
"""Latencies by their names in a result file -> the field of `Summary`."""


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """What a client saw of one request; times in seconds on any one clock.

    ``intended_s``: when the workload wanted it sent; ``sent_s``: when it was. ``dispatch_delay_s``: the part of the
    time between for which the client itself was late, after the request was due and its concurrency limit allowed it.
    ``chunk_s``: arrival of every message with content. ``output_tokens``: in all chunks together. ``chunk_tokens``:
    per chunk, where known. ``silent_chunks``: how many of the chunks only opened the answer, without any token.
    ``error``: set if the request failed, also when its stream ended in an error or without its end mark.
    """

    prompt_len: int
    intended_s: float
    sent_s: float
    dispatch_delay_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    chunk_tokens: list[int] | None = None
    silent_chunks: int = 0
    text: str = ""
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Finished without an error and with at least one chunk."""
        return self.error is None and bool(self.chunk_s)

    @property
    def ttft_s(self) -> float:
        return self.chunk_s[0] - self.sent_s if self.chunk_s else 0.0

    @property
    def latency_s(self) -> float:
        """E2EL."""
        return self.chunk_s[-1] - self.sent_s if self.chunk_s else 0.0

    @property
    def tpot_s(self) -> float:
        """0 for a request of one token: it has no gaps."""
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def queue_s(self) -> float:
        """Wait for the client's concurrency limit."""
        return self.sent_s - self.intended_s - self.dispatch_delay_s

    def itls_s(self) -> NDArray[np.float64]:
        """Gaps between successive chunks, shape (chunks - 1,)."""
        return np.diff(np.asarray(self.chunk_s, dtype=np.float64))


@dataclass(frozen=True, slots=True)
class Latency:
    """Mean, standard deviation and percentiles of one metric, in milliseconds; all 0 if nothing was measured."""

    mean_ms: float
    median_ms: float
    std_ms: float
    percentiles_ms: dict[float, float]

    @classmethod
    def of(cls, values_s: Sequence[float] | NDArray[np.float64], percentiles: Sequence[float]) -> Latency:
        """Statistics of ``values_s``, in seconds; percentiles interpolate linearly, as numpy's default does."""
        values = np.asarray(values_s, dtype=np.float64) * 1000.0
        if values.size == 0:
            values = np.zeros(1)
        at = np.percentile(values, [50.0, *percentiles])
        ps = {float(p): float(v) for p, v in zip(percentiles, at[1:], strict=True)}
        return cls(float(values.mean()), float(at[0]), float(values.std()), ps)

    def p(self, percentile: float) -> float:
        """Value at one of the percentiles asked for, in milliseconds."""
        return self.percentiles_ms[percentile]

    def to_json(self, name: str) -> dict[str, float]:
        """Keys ``mean_<name>_ms``, ``median_...``, ``std_...`` and ``p<percentile>_...``."""
        ps = {f"p{p:g}_{name}_ms": v for p, v in self.percentiles_ms.items()}
        return {
            f"mean_{name}_ms": self.mean_ms, f"median_{name}_ms": self.median_ms, f"std_{name}_ms": self.std_ms, **ps
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """Verified drafts of a run: rows with real drafts, their draft tokens, and those accepted, by position too."""

    num_drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...] = ()

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per verification, the model's own one included; 1 if nothing was drafted."""
        return 1.0 + self.accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    def to_json(self) -> dict[str, Any]:
        """Keys ``spec_decode_...``; the acceptance rate is in percent of the draft tokens."""
        n, tokens = self.num_drafts, self.draft_tokens
        return {
            "spec_decode_acceptance_rate": 100.0 * self.accepted_tokens / tokens if tokens else 0.0,
            "spec_decode_acceptance_length": self.acceptance_length,
            "spec_decode_num_drafts": n,
            "spec_decode_draft_tokens": tokens,
            "spec_decode_accepted_tokens": self.accepted_tokens,
            "spec_decode_per_position_acceptance_rates": [a / n if n else 0.0 for a in self.accepted_per_position],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run as a whole. ``queue`` and ``e2el_with_queue`` are None where the client had no concurrency limit.

    ``tokens_per_chunk``: mean over the chunks that carry tokens; 0 if there are none.
    """

    duration_s: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    good: int | None
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    tokens_per_chunk: float
    ttft: Latency
    tpot: Latency
    itl: Latency
    e2el: Latency
    queue: Latency | None = None
    e2el_with_queue: Latency | None = None

    def per_second(self, amount: float) -> float:
        return amount / self.duration_s if self.duration_s > 0 else 0.0


def summarise(
    records: Sequence[RequestRecord],
    duration_s: float,
    *,
    percentiles: Sequence[float] = PERCENTILES,
    goodput_slo_ms: Mapping[str, float] | None = None,
    max_concurrency: int | None = None,
    request_rate: float = math.inf,
) -> Summary:
    """Statistics over the successful requests of one run.

    ``goodput_slo_ms``: limits on ttft, tpot and e2el that a request must keep to count as good. Raises `ConfigError`
    for any other name.
    """
    done = [r for r in records if r.ok]
    itls = np.concatenate([r.itls_s() for r in done]) if done else np.zeros(0)
    e2els = [r.latency_s for r in done]
    queues = [r.queue_s for r in done]
    queued = None if max_concurrency is None else Latency.of(queues, percentiles)
    with_queue = None
    if max_concurrency is not None and not math.isinf(request_rate):
        with_queue = Latency.of([e + q for e, q in zip(e2els, queues, strict=True)], percentiles)
    peak_tokens, peak_requests = _peaks(done)
    output_tokens = sum(r.output_tokens for r in done)
    chunks = sum(len(r.chunk_s) - r.silent_chunks for r in done)
    return Summary(
        duration_s=duration_s,
        completed=len(done),
        failed=len(records) - len(done),
        total_input_tokens=sum(r.prompt_len for r in done),
        total_output_tokens=output_tokens,
        good=None if not goodput_slo_ms else sum(_is_good(r, goodput_slo_ms) for r in done),
        max_output_tokens_per_s=peak_tokens,
        max_concurrent_requests=peak_requests,
        tokens_per_chunk=output_tokens / chunks if chunks else 0.0,
        ttft=Latency.of([r.ttft_s for r in done], percentiles),
        tpot=Latency.of([r.tpot_s for r in done if r.output_tokens > 1], percentiles),
        itl=Latency.of(itls, percentiles),
        e2el=Latency.of(e2els, percentiles),
        queue=queued,
        e2el_with_queue=with_queue,
    )


def result_json(
    summary: Summary,
    records: Sequence[RequestRecord] = (),
    *,
    speculation: SpeculationCounts | None = None,
    metrics: Sequence[str] = tuple(METRICS),
) -> dict[str, Any]:
    """The measured part of a result file, with the keys of ``vllm bench serve --save-result``.

    ``records``: given, the per-request lists of ``--save-detailed`` are included. ``metrics``: which latencies; those
    of the client's queue are left out where there was none.
    """
    s = summary
    detailed = _detailed(records) if records else {}
    result: dict[str, Any] = {
        "duration": s.duration_s,
        "completed": s.completed,
        "failed": s.failed,
        "total_input_tokens": s.total_input_tokens,
        "total_output_tokens": s.total_output_tokens,
        "request_throughput": s.per_second(s.completed),
        "request_goodput": None if s.good is None else s.per_second(s.good),
        "output_throughput": s.per_second(s.total_output_tokens),
        "total_token_throughput": s.per_second(s.total_input_tokens + s.total_output_tokens),
        **detailed,
        "max_output_tokens_per_s": s.max_output_tokens_per_s,
        "max_concurrent_requests": s.max_concurrent_requests,
    }
    if speculation is not None:
        result.update(speculation.to_json())
    for name in metrics:
        require(name in METRICS, "metrics", f"unknown latency {name!r}, known are {', '.join(METRICS)}")
        latency: Latency | None = getattr(s, METRICS[name])
        if latency is not None:
            result.update(latency.to_json(name))
    return result


def _detailed(records: Sequence[RequestRecord]) -> dict[str, Any]:
    return {
        "input_lens": [r.prompt_len for r in records],
        "output_lens": [r.output_tokens if r.ok else 0 for r in records],
        "ttfts": [r.ttft_s for r in records],
        "itls": [r.itls_s().tolist() for r in records],
        "latencies": [r.latency_s for r in records],
        "start_times": [r.sent_s for r in records],
        "queue_times": [r.queue_s for r in records],
        "generated_texts": [r.text for r in records],
        "errors": [r.error or "" for r in records],
    }


def _is_good(record: RequestRecord, slo_ms: Mapping[str, float]) -> bool:
    measured = {"ttft": record.ttft_s, "tpot": record.tpot_s, "e2el": record.latency_s}
    for name, limit_ms in slo_ms.items():
        require(name in measured, f"goodput.{name}", f"unknown metric, known are {', '.join(measured)}")
        if measured[name] * 1000.0 > limit_ms:
            return False
    return True


def _peaks(done: Sequence[RequestRecord]) -> tuple[float, int]:
    """Output tokens in the busiest second, and requests that touch the busiest second, counted from the first send.

    Tokens are counted, not chunks; where it is not known how many a chunk had, a request's chunks share them evenly.
    A second counts every request that was in flight at any time within it, so the peak can exceed the concurrency
    limit.
    """
    if not done:
        return 0.0, 0
    start = min(r.sent_s for r in done)
    seconds = math.ceil(max(r.chunk_s[-1] for r in done) - start) + 1
    tokens, active = np.zeros(seconds), np.zeros(seconds + 1)
    for r in done:
        at = (np.asarray(r.chunk_s) - start).astype(np.int64)
        even = r.output_tokens / len(r.chunk_s)
        np.add.at(tokens, at, even if r.chunk_tokens is None else np.asarray(r.chunk_tokens, dtype=np.float64))
        active[int(r.sent_s - start)] += 1
        active[int(r.chunk_s[-1] - start) + 1] -= 1
    return float(tokens.max()), int(np.cumsum(active).max())
