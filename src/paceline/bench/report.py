# SPDX-License-Identifier: Apache-2.0
"""What a run came to: the result file, with the keys of ``vllm bench serve``, and a summary for people."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.load import Run
from paceline.core.results import Latency, SpeculationCounts, Summary, result_json, summarise

WIDTH = 50
SHOWN_REASONS = 10
HEADINGS = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency (per chunk)", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
    "client_queue_time": ("Client-side Queueing", "Client Queue Time"),
    "e2el_including_client_queue": ("Queue-inclusive End-to-end Latency", "E2EL incl. Client Queue"),
    "ttft_from_intended": ("TTFT from the Intended Send Time", "TTFT from Intended"),
    "e2el_from_intended": ("E2EL from the Intended Send Time", "E2EL from Intended"),
    "dispatch_delay": ("Client Dispatch Delay", "Dispatch Delay"),
}
"""Latencies by name -> heading and label."""
ADDED_KEYS = ("num_chunks", "tokens_per_chunk", "client_cpu_s")
"""Beside the latencies from the intended send time and the dispatch delay, keys that vLLM's file does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was to be reported: names and percentiles of latencies, limits of goodput, traffic as it was configured."""

    metrics: Sequence[str]
    percentiles: Sequence[float]
    goodput_slo_ms: Mapping[str, float]
    request_rate: float
    max_concurrency: int | None


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of one run. ``latencies``: those asked for, in order; ``client``: what the client adds to each.

    ``notes``: what the reader must know about how something was counted.
    """

    asked: Asked
    run: Run
    summary: Summary
    speculation: SpeculationCounts | None
    latencies: dict[str, Latency]
    client: dict[str, Latency]
    notes: Sequence[str] = ()

    @property
    def num_chunks(self) -> int:
        """Messages with choices in the successful answers."""
        return sum(len(r.chunk_s) for r in self.run.records if r.ok)

    def failures(self) -> list[tuple[str, int]]:
        """Reasons, most frequent first, and how many requests each failed."""
        return Counter(r.error or "" for r in self.run.records if not r.ok).most_common()


def make_report(
    asked: Asked, run: Run, speculation: SpeculationCounts | None = None, notes: Sequence[str] = ()
) -> Report:
    """Statistics of a run.

    Where a request rate was set (open loop), TTFT and E2EL are also measured from the time at which the workload
    wanted a request sent: a server that falls behind delays the client's later requests, and latencies from the
    actual send time would hide just that.
    """
    done = [r for r in run.records if r.ok]
    summary = summarise(
        run.records,
        run.duration_s,
        percentiles=asked.percentiles,
        goodput_slo_ms=asked.goodput_slo_ms,
        max_concurrency=asked.max_concurrency,
        request_rate=asked.request_rate,
    )
    every = {
        "ttft": summary.ttft,
        "tpot": summary.tpot,
        "itl": summary.itl,
        "e2el": summary.e2el,
        "client_queue_time": summary.queue,
        "e2el_including_client_queue": summary.e2el_with_queue,
    }
    latencies = {name: found for name in asked.metrics if (found := every[name]) is not None}
    client = {"dispatch_delay": Latency.of([r.dispatch_delay_s for r in done], asked.percentiles)}
    if not math.isinf(asked.request_rate):
        late = [r.sent_s - r.intended_s for r in done]
        from_intended = {"ttft": [r.ttft_s for r in done], "e2el": [r.latency_s for r in done]}
        for name, values in from_intended.items():
            shifted = [a + b for a, b in zip(late, values, strict=True)]
            client[f"{name}_from_intended"] = Latency.of(shifted, asked.percentiles)
    return Report(asked, run, summary, speculation, latencies, client, notes)


def to_json(report: Report, about: Mapping[str, Any], *, detailed: bool) -> dict[str, Any]:
    """A result file. ``about``: what was run, which comes first. ``detailed``: with the lists of every request."""
    measured = result_json(
        report.summary,
        report.run.records if detailed else (),
        speculation=report.speculation,
        metrics=tuple(report.asked.metrics),
    )
    result = {**about}
    for key, value in measured.items():
        result[key] = value
        if key == "max_concurrent_requests":
            result["rtfx"] = 0.0  # seconds of audio per second; no prompt has any
    for name, latency in report.client.items():
        result.update(latency.to_json(name))
    result.update(zip(ADDED_KEYS, _added(report), strict=True))
    if detailed:
        result["dispatch_delays"] = [r.dispatch_delay_s for r in report.run.records]
    return result


def _added(report: Report) -> tuple[int, float, float]:
    return report.num_chunks, report.summary.tokens_per_chunk, report.run.client_cpu_s


def to_text(report: Report) -> str:
    """The summary, labels as in vLLM's."""
    lines = [_heading("Serving Benchmark Result", "="), *_totals(report)]
    for name, latency in report.latencies.items():
        lines += _latency(name, latency)
    for name, latency in report.client.items():
        if name != "dispatch_delay":
            lines += _latency(name, latency)
    lines += _client(report)
    if report.speculation is not None:
        lines += _speculation(report.speculation)
    lines += _failures(report)
    lines += [f"Note: {note}" for note in report.notes]
    return "\n".join([*lines, "=" * WIDTH])


def _totals(report: Report) -> list[str]:
    s, asked = report.summary, report.asked
    lines = [_line("Successful requests:", s.completed), _line("Failed requests:", s.failed)]
    if asked.max_concurrency is not None:
        lines.append(_line("Maximum request concurrency:", asked.max_concurrency))
    if not math.isinf(asked.request_rate):
        lines.append(_line("Request rate configured (RPS):", asked.request_rate))
    lines += [
        _line("Benchmark duration (s):", s.duration_s),
        _line("Total input tokens:", s.total_input_tokens),
        _line("Total generated tokens:", s.total_output_tokens),
        _line("Request throughput (req/s):", s.per_second(s.completed)),
    ]
    if s.good is not None:
        lines.append(_line("Request goodput (req/s):", s.per_second(s.good)))
    return [
        *lines,
        _line("Output token throughput (tok/s):", s.per_second(s.total_output_tokens)),
        _line("Peak output token throughput (tok/s):", s.max_output_tokens_per_s),
        _line("Peak concurrent requests:", float(s.max_concurrent_requests)),
        _line("Total token throughput (tok/s):", s.per_second(s.total_input_tokens + s.total_output_tokens)),
    ]


def _latency(name: str, latency: Latency) -> list[str]:
    heading, label = HEADINGS[name]
    lines = [
        _heading(heading, "-"),
        _line(f"Mean {label} (ms):", latency.mean_ms),
        _line(f"Median {label} (ms):", latency.median_ms),
    ]
    return lines + [_line(f"P{p:g} {label} (ms):", value) for p, value in latency.percentiles_ms.items()]


def _client(report: Report) -> list[str]:
    """How chunks and tokens relate, and what of the latencies may be the client's own doing.

    Where everything is due at once, the queue's time says nothing that the number of requests does not.
    """
    lines = [
        _heading("Client", "-"),
        _line("Chunks received:", report.num_chunks),
        _line("Mean tokens per chunk:", report.summary.tokens_per_chunk),
    ]
    shown = {"Dispatch Delay": report.client["dispatch_delay"]}
    open_loop = not math.isinf(report.asked.request_rate)
    if open_loop and report.summary.queue is not None and "client_queue_time" not in report.latencies:
        shown["Client Queue Time"] = report.summary.queue
    for label, latency in shown.items():
        lines.append(_line(f"Mean {label} (ms):", latency.mean_ms))
        lines += [_line(f"P{p:g} {label} (ms):", value) for p, value in latency.percentiles_ms.items()]
    duration = report.run.duration_s
    return [*lines, _line("CPU (% of a core):", 100.0 * report.run.client_cpu_s / duration if duration else 0.0)]


def _speculation(counts: SpeculationCounts) -> list[str]:
    found = counts.to_json()
    lines = [
        _heading("Speculative Decoding", "-"),
        _line("Acceptance rate (%):", found["spec_decode_acceptance_rate"]),
        _line("Acceptance length:", counts.acceptance_length),
        _line("Drafts:", counts.num_drafts),
        _line("Draft tokens:", counts.draft_tokens),
        _line("Accepted tokens:", counts.accepted_tokens),
    ]
    rates = found["spec_decode_per_position_acceptance_rates"]
    if rates:
        lines.append("Per-position acceptance (%):")
    return lines + [_line(f"  Position {i}:", 100.0 * rate) for i, rate in enumerate(rates)]


def _failures(report: Report) -> list[str]:
    reasons = report.failures()
    if not reasons:
        return []
    lines = [_heading("Failures", "-")]
    lines += [f"{count} x {reason}" for reason, count in reasons[:SHOWN_REASONS]]
    if len(reasons) > SHOWN_REASONS:
        lines.append(f"and {len(reasons) - SHOWN_REASONS} more reasons (--save-detailed keeps them all)")
    return lines


def _heading(text: str, fill: str) -> str:
    return f" {text} ".center(WIDTH, fill) if fill == "=" else text.center(WIDTH, fill)


def _line(label: str, value: float) -> str:
    return f"{label:<40} {value:<10}" if isinstance(value, int) else f"{label:<40} {value:<10.2f}"
