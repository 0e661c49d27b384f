# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics under the names that dashboards for vLLM read.

Gauges and the schedulers' totals are read from each engine's last snapshot when scraped. Latencies and token counts
are taken where the user sees them: at the front, when the engine's message arrives. Times are in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from paceline.engine.aio import Tracked
from paceline.engine.line import WAIT_BOUNDS_S
from paceline.engine.messages import ModelInfo, Snapshot, Update

TTFT_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
"""Fine around the limits that operators set for decode steps, 10 to 100 ms."""
LATENCY_S = (0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1, 2, 5, 10, 20, 50, 100)
LABELS = ("model_name", "engine")
FINISHED_REASONS = ("stop", "length", "abort", "error")
GRAPH_MODES = ("NONE", "FULL")
"""In the order of their numbers in `core.graphs`."""

_TOTALS: tuple[tuple[str, str, Callable[[Snapshot], int]], ...] = (
    ("vllm:num_preemptions", "Times a running request was sent back to the queue.", lambda s: s.preemptions),
    ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda s: s.prefix_queries),
    ("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", lambda s: s.prefix_hits),
    ("vllm:external_prefix_cache_hits", "Tokens whose KV a connector provided.", lambda s: s.external_hits),
    ("vllm:spec_decode_num_drafts", "Verifications that carried a draft.", lambda s: s.num_drafts),
    ("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.", lambda s: s.num_draft_tokens),
    ("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", lambda s: s.num_accepted_tokens),
    ("paceline:busy_steps", "Steps with rows.", lambda s: s.busy_steps),
    ("paceline:uniform_steps", "Steps whose rows all had the verifier's width.", lambda s: s.uniform_steps),
    ("paceline:kv_load_failures", "KV loads that failed or missed their deadline.", lambda s: s.load_failures),
    ("paceline:idle_rank_admissions", "Requests that came when their rank had no other.", lambda s: s.idle_admissions),
    ("paceline:graph_padding_tokens", "Inert tokens that filled FULL steps.", lambda s: s.graph_padding_tokens),
    ("paceline:late_transfers", "Transfer reports for nobody, too late or twice.", lambda s: s.late_transfers),
)
_GAUGES: tuple[tuple[str, str, Callable[[Snapshot], float]], ...] = (
    ("vllm:num_requests_running", "Requests in the running batch.", lambda s: s.running),
    ("vllm:num_requests_waiting", "Requests in the queue.", lambda s: s.waiting),
    ("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", lambda s: s.kv_usage),
    (
        "paceline:quarantined_blocks",
        "KV blocks that a transfer past its deadline may still write to or read.",
        lambda s: s.quarantined_blocks,
    ),
)


def powers_1_2_5(limit: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... up to ``limit``."""
    buckets, scale = [], 1
    while scale <= limit:
        buckets += [float(m * scale) for m in (1, 2, 5) if m * scale <= limit]
        scale *= 10
    return buckets


_FAMILIES: tuple[tuple[str, str, str, Callable[[Snapshot], Iterable[tuple[str, float]]]], ...] = (
    (
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens accepted, by position.",
        "position",
        lambda s: [(str(i), count) for i, count in enumerate(s.num_accepted_tokens_per_pos)],
    ),
    (
        "paceline:uniformity_miss",
        "Steps that were not uniform, by reason.",
        "reason",
        lambda s: sorted(s.misses.items()),
    ),
    (
        "paceline:steps",
        "Steps with rows that were executed, by graph mode.",
        "mode",
        lambda s: zip(GRAPH_MODES, s.steps_by_mode, strict=True),
    ),
    (
        "paceline:dummy_steps",
        "Steps that were executed without rows since other ranks had some, by graph mode.",
        "mode",
        lambda s: zip(GRAPH_MODES, s.dummies_by_mode, strict=True),
    ),
)


class _FromSnapshots(Collector):
    """What the engines count, read when scraped. ``labels``: by rank."""

    def __init__(self, snapshots: Callable[[], Sequence[Snapshot]], labels: Sequence[tuple[str, str]]) -> None:
        self._snapshots = snapshots
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        each = list(zip(self._labels, self._snapshots(), strict=True))
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            for labels, s in each:
                gauge.add_metric(labels, value(s))
            yield gauge
        for name, text, total in _TOTALS:
            counter = CounterMetricFamily(name, text, labels=LABELS)
            for labels, s in each:
                counter.add_metric(labels, total(s))
            yield counter
        for name, text, label, parts in _FAMILIES:
            counter = CounterMetricFamily(name, text, labels=(*LABELS, label))
            for labels, s in each:
                for part, count in parts(s):
                    counter.add_metric((*labels, part), count)
            yield counter
        waits = HistogramMetricFamily(
            "paceline:barrier_wait_seconds", "How long a step's vote waited for the other ranks.", labels=LABELS
        )
        for labels, s in each:
            if s.barrier_wait_buckets:
                ends = [*map(str, WAIT_BOUNDS_S), "+Inf"]
                counts = accumulate(s.barrier_wait_buckets)
                waits.add_metric(labels, list(zip(ends, counts, strict=True)), s.barrier_wait_s)
        yield waits


class Metrics:
    """All metrics of one server; an `Observer` of its engines, whose ranks are the label ``engine``.

    What is refused or asked at the door counts for the first of them.
    """

    def __init__(self, model_name: str, model: ModelInfo, ranks: int = 1, first_rank: int = 0) -> None:
        self.registry = CollectorRegistry()
        self._labels = [(model_name, str(first_rank + i)) for i in range(ranks)]
        self.snapshots: Callable[[], Sequence[Snapshot]] = lambda: [Snapshot()] * ranks
        GCCollector(self.registry)
        PlatformCollector(self.registry)
        ProcessCollector(registry=self.registry)
        self.registry.register(_FromSnapshots(lambda: self.snapshots(), self._labels))
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
        self._ended = [{r: ended.labels(*labels, r) for r in FINISHED_REASONS} for labels in self._labels]
        rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused at the door, by reason.",
            (*LABELS, "reason"),
            registry=self.registry,
        )
        self._rejected = rejections.labels(*self._labels[0], "max_num_queued_reqs")
        self._describe(model)

    def rejected(self) -> None:
        """A request was refused since the queue was full."""
        self._rejected.inc()

    def asked(self, n: int) -> None:
        """A request for ``n`` choices per prompt came in."""
        self._n[0].observe(n)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    # -- Observer ------------------------------------------------------------------------------------------

    def step(self, update: Update) -> None:
        """A step's message came."""
        if update.tokens:
            self._step_tokens[update.rank].observe(update.tokens)

    def output(self, request: Tracked, tokens: int, now: float) -> None:
        """A request gained ``tokens``; its times are those before."""
        rank = request.rank
        self._generation_tokens[rank].inc(tokens)
        if request.first is None:
            self._prompt_tokens[rank].inc(len(request.add.prompt_token_ids))
            self._ttft[rank].observe(now - request.add.arrival)
        else:
            assert request.last is not None
            self._itl[rank].observe(now - request.last)

    def end(self, request: Tracked, reason: str, now: float) -> None:
        """A request ended. Only whole ones tell how long a request takes."""
        rank = request.rank
        self._ended[rank][reason].inc()
        if request.scheduled is not None:
            self._queue[rank].observe(max(0.0, request.scheduled - request.add.arrival))
        if reason not in ("stop", "length"):
            return
        self._e2e[rank].observe(now - request.add.arrival)
        self._prompt_lengths[rank].observe(len(request.add.prompt_token_ids))
        self._output_lengths[rank].observe(request.num_output)
        self._max_tokens[rank].observe(request.add.params.max_tokens)
        if request.scheduled is None or request.first is None or request.last is None:
            return
        decode_s = request.last - request.first
        self._prefill[rank].observe(request.first - request.scheduled)
        self._decode[rank].observe(decode_s)
        self._inference[rank].observe(request.last - request.scheduled)
        if request.num_output > 1:
            self._tpot[rank].observe(decode_s / (request.num_output - 1))

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> list[Histogram]:
        """By rank."""
        histogram = Histogram(name, text, LABELS, buckets=buckets, registry=self.registry)
        return [histogram.labels(*labels) for labels in self._labels]

    def _counter(self, name: str, text: str) -> list[Counter]:
        """By rank."""
        counter = Counter(name, text, LABELS, registry=self.registry)
        return [counter.labels(*labels) for labels in self._labels]

    def _describe(self, model: ModelInfo) -> None:
        facts = {
            "block_size": str(model.block_size),
            "num_gpu_blocks": str(model.num_blocks),
            "enable_prefix_caching": str(model.enable_prefix_caching),
        }
        gauge = Gauge("vllm:cache_config_info", "The KV cache.", (*LABELS, *facts), registry=self.registry)
        for labels in self._labels:
            gauge.labels(*labels, *facts.values()).set(1)
        names = (*LABELS, "cudagraph_mode")
        graphs = Gauge("paceline:graph_config_info", "How decode graphs are used.", names, registry=self.registry)
        for labels in self._labels:
            graphs.labels(*labels, model.cudagraph_mode).set(1)
