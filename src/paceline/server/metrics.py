# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics under the names that dashboards for vLLM read.

Gauges and the scheduler's totals are read from the engine's last snapshot when scraped. Latencies and token counts
are taken where the user sees them: at the front, when the engine's message arrives. Times are in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from paceline.engine.aio import Tracked
from paceline.engine.messages import ModelInfo, Snapshot, Update

TTFT_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
"""Fine around the limits that operators set for decode steps, 10 to 100 ms."""
LATENCY_S = (0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1, 2, 5, 10, 20, 50, 100)
LABELS = ("model_name", "engine")
FINISHED_REASONS = ("stop", "length", "abort", "error")

_TOTALS: tuple[tuple[str, str, Callable[[Snapshot], int]], ...] = (
    ("vllm:num_preemptions", "Times a running request was sent back to the queue.", lambda s: s.preemptions),
    ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda s: s.prefix_queries),
    ("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", lambda s: s.prefix_hits),
    ("vllm:external_prefix_cache_hits", "Tokens whose KV a connector provided.", lambda s: s.external_hits),
    ("vllm:spec_decode_num_drafts", "Verifications that carried a draft.", lambda s: s.num_drafts),
    ("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.", lambda s: s.num_draft_tokens),
    ("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", lambda s: s.num_accepted_tokens),
    ("paceline:steps", "Steps with rows.", lambda s: s.busy_steps),
    ("paceline:uniform_steps", "Steps whose rows all had the verifier's width.", lambda s: s.uniform_steps),
)
_GAUGES: tuple[tuple[str, str, Callable[[Snapshot], float]], ...] = (
    ("vllm:num_requests_running", "Requests in the running batch.", lambda s: s.running),
    ("vllm:num_requests_waiting", "Requests in the queue.", lambda s: s.waiting),
    ("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", lambda s: s.kv_usage),
)


def powers_1_2_5(limit: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... up to ``limit``."""
    buckets, scale = [], 1
    while scale <= limit:
        buckets += [float(m * scale) for m in (1, 2, 5) if m * scale <= limit]
        scale *= 10
    return buckets


class _FromSnapshot(Collector):
    """What the engine counts, read when scraped."""

    def __init__(self, snapshot: Callable[[], Snapshot], labels: Sequence[str]) -> None:
        self._snapshot = snapshot
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        s, labels = self._snapshot(), self._labels
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(labels, value(s))
            yield gauge
        for name, text, total in _TOTALS:
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(labels, total(s))
            yield counter
        by_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position.",
            labels=(*LABELS, "position"),
        )
        for position, count in enumerate(s.num_accepted_tokens_per_pos):
            by_position.add_metric((*labels, str(position)), count)
        yield by_position
        misses = CounterMetricFamily(
            "paceline:step_misses", "Steps that were not uniform, by reason.", labels=(*LABELS, "reason")
        )
        for reason, count in sorted(s.misses.items()):
            misses.add_metric((*labels, reason), count)
        yield misses


class Metrics:
    """All metrics of one server; an `Observer` of its engine."""

    def __init__(self, model_name: str, model: ModelInfo) -> None:
        self.registry = CollectorRegistry()
        self._labels = (model_name, "0")
        self.snapshot: Callable[[], Snapshot] = Snapshot
        GCCollector(self.registry)
        PlatformCollector(self.registry)
        ProcessCollector(registry=self.registry)
        self.registry.register(_FromSnapshot(lambda: self.snapshot(), self._labels))
        lengths = powers_1_2_5(model.max_model_len)
        histogram, counter = self._histogram, self._counter
        self._ttft = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", TTFT_S)
        self._itl = histogram("vllm:inter_token_latency_seconds", "Between outputs of a request (per chunk).", ITL_S)
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token after the first.", ITL_S
        )
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", LATENCY_S)
        self._queue = histogram("vllm:request_queue_time_seconds", "From arrival to the first schedule.", LATENCY_S)
        self._prefill = histogram(
            "vllm:request_prefill_time_seconds", "From the first schedule to the first token.", LATENCY_S
        )
        self._decode = histogram("vllm:request_decode_time_seconds", "From the first token to the last.", LATENCY_S)
        self._inference = histogram(
            "vllm:request_inference_time_seconds", "From the first schedule to the last token.", LATENCY_S
        )
        self._prompt_lengths = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", lengths)
        self._output_lengths = histogram("vllm:request_generation_tokens", "Output tokens of a request.", lengths)
        self._max_tokens = histogram("vllm:request_params_max_tokens", "max_tokens of a request.", lengths)
        self._n = histogram("vllm:request_params_n", "n of a request.", CHOICES)
        self._step_tokens = histogram("vllm:iteration_tokens_total", "Tokens computed in a step.", STEP_TOKENS)
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that got a first token.")
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        ended = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._ended = {reason: ended.labels(*self._labels, reason) for reason in FINISHED_REASONS}
        rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused at the door, by reason.",
            (*LABELS, "reason"),
            registry=self.registry,
        )
        self._rejected = rejections.labels(*self._labels, "max_num_queued_reqs")
        self._describe_cache(model)

    def rejected(self) -> None:
        """A request was refused since the queue was full."""
        self._rejected.inc()

    def asked(self, n: int) -> None:
        """A request for ``n`` choices per prompt came in."""
        self._n.observe(n)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    # -- Observer ------------------------------------------------------------------------------------------

    def step(self, update: Update) -> None:
        """A step's message came."""
        if update.tokens:
            self._step_tokens.observe(update.tokens)

    def output(self, request: Tracked, tokens: int, now: float) -> None:
        """A request gained ``tokens``; its times are those before."""
        self._generation_tokens.inc(tokens)
        if request.first is None:
            self._prompt_tokens.inc(len(request.add.prompt_token_ids))
            self._ttft.observe(now - request.add.arrival)
        else:
            assert request.last is not None
            self._itl.observe(now - request.last)

    def end(self, request: Tracked, reason: str, now: float) -> None:
        """A request ended. Only whole ones tell how long a request takes."""
        self._ended[reason].inc()
        if request.scheduled is not None:
            self._queue.observe(max(0.0, request.scheduled - request.add.arrival))
        if reason not in ("stop", "length"):
            return
        self._e2e.observe(now - request.add.arrival)
        self._prompt_lengths.observe(len(request.add.prompt_token_ids))
        self._output_lengths.observe(request.num_output)
        self._max_tokens.observe(request.add.params.max_tokens)
        if request.scheduled is None or request.first is None or request.last is None:
            return
        decode_s = request.last - request.first
        self._prefill.observe(request.first - request.scheduled)
        self._decode.observe(decode_s)
        self._inference.observe(request.last - request.scheduled)
        if request.num_output > 1:
            self._tpot.observe(decode_s / (request.num_output - 1))

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Any:
        histogram = Histogram(name, text, LABELS, buckets=buckets, registry=self.registry)
        return histogram.labels(*self._labels)

    def _counter(self, name: str, text: str) -> Any:
        return Counter(name, text, LABELS, registry=self.registry).labels(*self._labels)

    def _describe_cache(self, model: ModelInfo) -> None:
        facts = {
            "block_size": str(model.block_size),
            "num_gpu_blocks": str(model.num_blocks),
            "enable_prefix_caching": str(model.enable_prefix_caching),
        }
        gauge = Gauge("vllm:cache_config_info", "The KV cache.", (*LABELS, *facts), registry=self.registry)
        gauge.labels(*self._labels, *facts.values()).set(1)
