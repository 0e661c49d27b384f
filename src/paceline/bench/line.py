# SPDX-License-Identifier: Apache-2.0
"""The experiment that the project exists for, on real processes: one line of ranks, before and after.

Real ranks run a mixture of experts in lock-step, DecodeBench stands in for the prefill side, a random EAGLE-3 model
drafts, and drafts are accepted at given rates. Every arrival rate is measured twice: *before*, requests that
arrive at an idle rank are not padded to the verifier's width (``pad_resumed: running``); *after*, they are.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from paceline.bench.counters import ACCEPTED, DRAFTS
from paceline.bench.options import BenchOptions
from paceline.bench.serve import Stage, run
from paceline.bench.served import server
from paceline.bench.texts import LocalTokenizer
from paceline.core.config import ConfigError, GraphMode, require, require_int
from paceline.core.results import Latency
from paceline.core.workload import Workload

ACCEPTANCE = (0.70, 0.49, 0.3382)
"""Of vLLM's pull request 55126: P(the first i + 1 drafts are accepted); acceptance length 2.5282."""
BEFORE, AFTER = "running", "resumed"
"""Values of ``pad_resumed``."""
VOCAB_SIZE = 32_000
"""Random prompt ids lie below it, if the model has as many. DecodeBench computes none of them but the last."""
PERCENTILES = (50.0, 99.0)
PROFILE_PROMPTS = 6
"""Requests per stream of a profile's run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineOptions:
    """``model``: a folder with a mixture of experts, ``draft``: its EAGLE-3 model. Lengths are in tokens.

    ``rounds``: how often everything is measured, each time with another seed; the gaps of all are taken together.
    """

    model: Path
    draft: Path
    ranks: int = 2
    quantization: str = "int8"
    max_num_seqs: int = 8
    acceptance: tuple[float, ...] = ACCEPTANCE
    request_rates: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)
    num_prompts: int = 120
    input_len: int = 256
    output_len: int = 16
    range_ratio: float = 0.5
    block_size: int = 16
    vocab_size: int = VOCAB_SIZE
    profile_concurrency: tuple[int, ...] = (1, 2, 4, 8)
    rounds: int = 1
    seed: int = 300

    def __post_init__(self) -> None:
        sizes = ("max_num_seqs", "input_len", "output_len", "block_size", "vocab_size")
        for name in ("ranks", "num_prompts", "rounds", *sizes):
            require_int(getattr(self, name), 1, name)
        require(self.ranks >= 2, "ranks", f"a line needs at least 2, got {self.ranks}")
        require(len(self.acceptance) > 0, "acceptance", "needs a rate for each draft")
        require(len(self.request_rates) > 0, "request_rates", "name at least one")
        good = all(math.isfinite(rate) and rate > 0 for rate in self.request_rates)
        require(good, "request_rates", f"must be above 0, got {', '.join(map(str, self.request_rates))}")

    @property
    def num_speculative_tokens(self) -> int:
        return len(self.acceptance)

    @property
    def width(self) -> int:
        """W, tokens of a verifier row."""
        return 1 + len(self.acceptance)

    @property
    def max_model_len(self) -> int:
        """Holds the longest request, and leaves every row clear of the limit, near which drafts are dropped."""
        longest = sum(math.ceil(length * (1 + self.range_ratio)) for length in (self.input_len, self.output_len))
        return longest + 4 * self.width

    @property
    def num_blocks(self) -> int:
        """As many as `max_num_seqs` longest requests need: the pool never decides."""
        each = -(-(self.max_model_len + 2 * self.width) // self.block_size)
        return 1 + self.max_num_seqs * each

    @property
    def acceptance_length(self) -> float:
        """What the rates come to: tokens per verification."""
        return 1 + sum(self.acceptance)

    def speculation(self, pad_resumed: str) -> dict[str, Any]:
        """Speculative decoding, under vLLM's keys."""
        return {
            "method": "eagle3",
            "num_speculative_tokens": self.num_speculative_tokens,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": list(self.acceptance),
            "disable_eagle_block_drop": True,
            "pad_resumed": pad_resumed,
        }

    def workload(self, rate: float, num_prompts: int, max_concurrency: int | None, turn: int = 0) -> Workload:
        """The load at ``rate`` requests per second in round ``turn``."""
        return Workload(
            input_len=self.input_len,
            output_len=self.output_len,
            range_ratio=self.range_ratio,
            vocab_size=self.vocab_size,
            num_prompts=num_prompts,
            num_warmups=2 * self.ranks,
            request_rate=rate,
            max_concurrency=max_concurrency,
            seed=self.seed + turn,
        )

    def server_arguments(self, pad_resumed: str, mode: GraphMode) -> list[str]:
        """``paceline serve`` with these: flags as vLLM names them."""
        fill = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}
        flags: dict[str, object] = {
            "--quantization": self.quantization,
            "--data-parallel-size": self.ranks,
            "--max-num-seqs": self.max_num_seqs,
            "--max-num-batched-tokens": self.max_num_seqs * self.width,
            "--max-model-len": self.max_model_len,
            "--block-size": self.block_size,
            "--num-gpu-blocks-override": self.num_blocks,
            "--speculative-config": json.dumps({**self.speculation(pad_resumed), "model": str(self.draft)}),
            "--kv-transfer-config": json.dumps(fill),
            "--compilation-config": json.dumps({"cudagraph_mode": mode}),
        }
        texts = [str(part) for flag in flags.items() for part in flag]
        return [str(self.model), "--enable-expert-parallel", "--no-enable-prefix-caching", *texts]


@dataclass(frozen=True, slots=True)
class Counts:
    """What the executors and schedulers of all ranks have counted since the server's start.

    ``steps``: steps that the group ran together, by mode, as an executor counts them, its dummies included.
    ``misses``: rank-steps that were not uniform W, by reason. ``drafts``: verifications that carried drafts.
    """

    steps: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    idle_rank_admissions: int = 0
    drafts: int = 0
    accepted: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.steps + other.steps,
            self.misses + other.misses,
            self.idle_rank_admissions + other.idle_rank_admissions,
            self.drafts + other.drafts,
            self.accepted + other.accepted,
        )

    def since(self, before: Counts) -> Counts:
        """What was added after ``before`` was read."""
        return Counts(
            self.steps - before.steps,
            self.misses - before.misses,
            self.idle_rank_admissions - before.idle_rank_admissions,
            self.drafts - before.drafts,
            self.accepted - before.accepted,
        )

    @property
    def group_steps(self) -> int:
        return self.steps.total()

    @property
    def full_step_share(self) -> float:
        """Of the group's steps, those that ran FULL; NaN if there was none."""
        return self.steps["FULL"] / self.group_steps if self.group_steps else math.nan

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification that carried drafts; NaN if there was none."""
        return 1 + self.accepted / self.drafts if self.drafts else math.nan


@dataclass(frozen=True, slots=True)
class Load:
    """A load that was sent: the gaps between an answer's messages in s, each of which carries a step's tokens.

    ``failures``: requests that failed, by reason.
    """

    gaps_s: NDArray[np.float64]
    counts: Counts
    completed: int
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def itl(self) -> Latency:
        """ITL, per chunk."""
        return Latency.of(self.gaps_s, PERCENTILES)


@dataclass(frozen=True, slots=True)
class Measured:
    """One side at one rate: a load per round."""

    loads: tuple[Load, ...]

    @property
    def itl(self) -> Latency:
        """ITL, per chunk, of all rounds together."""
        return Latency.of(np.concatenate([load.gaps_s for load in self.loads]), PERCENTILES)

    @property
    def counts(self) -> Counts:
        return sum((load.counts for load in self.loads), Counts())

    @property
    def failures(self) -> Counter[str]:
        return sum((load.failures for load in self.loads), Counter())

    def to_json(self) -> dict[str, Any]:
        itl, counts = self.itl, self.counts
        return {
            "p50_itl_ms": itl.p(50),
            "p99_itl_ms": itl.p(99),
            "p99_itl_ms_by_round": [load.itl.p(99) for load in self.loads],
            "full_step_share": counts.full_step_share,
            "misses": dict(counts.misses),
            "group_steps": counts.group_steps,
            "idle_rank_admissions": counts.idle_rank_admissions,
            "acceptance_length": counts.acceptance_length,
            "completed": sum(load.completed for load in self.loads),
            "failed": self.failures.total(),
        }


@dataclass(frozen=True, slots=True)
class Profile:
    """Median ITL in ms by requests in flight, FULL and eager: what the laboratory needs to know of these ranks."""

    full: dict[int, float]
    eager: dict[int, float]


@dataclass(frozen=True, slots=True)
class LineResult:
    """``before`` and ``after``: by request rate."""

    options: LineOptions
    before: dict[float, Measured]
    after: dict[float, Measured]
    profile: Profile | None = None

    @property
    def measured(self) -> list[Measured]:
        """Both sides at all rates."""
        return [*self.before.values(), *self.after.values()]

    @property
    def failures(self) -> Counter[str]:
        """Requests that failed in the whole experiment, by reason."""
        return sum((one.failures for one in self.measured), Counter())

    @property
    def acceptance_length(self) -> float:
        """Of the whole experiment: of a single load it scatters by a twentieth or so around what was given."""
        return sum((one.counts for one in self.measured), Counts()).acceptance_length


def measure_line(options: LineOptions, stage: Stage, *, profile: bool = True) -> LineResult:
    """Measure every rate before and after, each time on a server of its own, and profile a step.

    Rounds take the two sides in turn, so that a machine that becomes slower or faster meets both.

    Raises:
        ServerFailed: the ranks do not start.
    """
    loads: dict[tuple[str, float], list[Load]] = defaultdict(list)
    full: dict[int, float] = {}
    for turn in range(options.rounds):
        for pad_resumed in (BEFORE, AFTER) if turn % 2 == 0 else (AFTER, BEFORE):
            with _ranks(options, pad_resumed, "FULL_DECODE_ONLY", stage) as url:
                for rate in options.request_rates:
                    workload = options.workload(rate, options.num_prompts, None, turn)
                    loads[pad_resumed, rate].append(measure_load(url, workload, stage))
                # Afterwards, so that the ranks of both sides have the same behind them when they are measured.
                if pad_resumed == AFTER and profile and not full:
                    full = _profile(options, url, stage)
    eager = None
    if profile:
        with _ranks(options, AFTER, "NONE", stage) as url:
            eager = _profile(options, url, stage)

    def side(pad_resumed: str) -> dict[float, Measured]:
        return {rate: Measured(tuple(loads[pad_resumed, rate])) for rate in options.request_rates}

    return LineResult(options, side(BEFORE), side(AFTER), None if eager is None else Profile(full, eager))


@contextmanager
def _ranks(options: LineOptions, pad_resumed: str, mode: GraphMode, stage: Stage) -> Iterator[str]:
    """The address of a server; that it is being started is shown."""
    with ExitStack() as running:
        with stage(f"starting {options.ranks} ranks, pad_resumed: {pad_resumed}, {mode}"):
            url, _ = running.enter_context(server(options.server_arguments(pad_resumed, mode)))
        yield url


def measure_load(url: str, workload: Workload, stage: Stage) -> Load:
    """Send a load, warm-ups first, and take what the ranks counted from then on."""
    bench = BenchOptions(
        base_url=url,
        workload=workload,
        vocab_size=workload.vocab_size,
        prompt_token_ids=True,
        temperature=0.0,
        metric_percentiles=PERCENTILES,
    )
    outcome = run(bench, _no_tokenizer, stage)
    before, after = map(counts_in, outcome.metrics)
    report = outcome.report
    gaps = [record.itls_s() for record in report.run.records if record.ok]
    failures = Counter(dict(report.failures()))
    return Load(np.concatenate([np.empty(0), *gaps]), after.since(before), report.summary.completed, failures)


def _profile(options: LineOptions, url: str, stage: Stage) -> dict[int, float]:
    """Median ITL in ms with a constant number of requests in flight."""
    return {
        count: measure_load(url, options.workload(math.inf, PROFILE_PROMPTS * count, count), stage).itl.p(50)
        for count in options.profile_concurrency
        if count <= options.ranks * options.max_num_seqs
    }


def _no_tokenizer(name: str) -> LocalTokenizer:
    raise ConfigError("tokenizer", f"prompts are ids here; {name!r} is not needed")


def counts_in(text: str) -> Counts:
    """The counters in Prometheus text, joined over the ranks."""
    by_engine: dict[str, Counter[str]] = {}
    misses: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels, value = sample.labels, round(sample.value) if math.isfinite(sample.value) else 0
            if sample.name in ("paceline:steps_total", "paceline:dummy_steps_total"):
                by_engine.setdefault(labels["engine"], Counter())[labels["mode"]] += value
            elif sample.name == "paceline:uniformity_miss_total":
                misses[labels["reason"]] += value
            else:
                sums[sample.name] += value
    return Counts(
        # Every rank runs every step of the group; a snapshot may be a step behind.
        max(by_engine.values(), key=Counter.total, default=Counter()),
        misses,
        sums["paceline:idle_rank_admissions_total"],
        sums[DRAFTS],
        sums[ACCEPTED],
    )


def rates_json(result: LineResult) -> list[dict[str, Any]]:
    """Before and after, by rate."""
    return [
        {"request_rate": rate, "before": result.before[rate].to_json(), "after": result.after[rate].to_json()}
        for rate in result.options.request_rates
    ]


def parse_rates(text: str) -> tuple[float, ...]:
    """Request rates separated by commas. Raises `ConfigError`."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError("request_rates", f"must be numbers separated by commas, got {text!r}") from None
