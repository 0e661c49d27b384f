# SPDX-License-Identifier: Apache-2.0
"""A scenario: engine, cluster, load and costs of one simulation, loaded from YAML and validated field by field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from paceline.core.config import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    GraphConfig,
    SchedulerConfig,
    SpeculationConfig,
    require,
    require_choice,
    require_int,
)
from paceline.core.workload import Workload
from paceline.sim.fields import as_plain, build, has_path, read_yaml, set_path

NodeRouter = Literal["round_robin"]
RankBalance = Literal["hybrid"]
ConnectorName = Literal["none", "DecodeBenchConnector"]
CostName = Literal["linear"]

MEASURES = ("p50_itl_ms", "p99_itl_ms", "p50_ttft_ms", "p99_ttft_ms")
"""What an observed cell may state, and a simulated one is compared by."""


MOST_MS = 1_000_000.0
"""Upper limit of a cost and of a delay: beyond it virtual time passes in snapshots and little else."""
MOST_JITTER = 100.0


def _require_range(value: float, least: float, field: str, most: float = math.inf) -> None:
    finite = math.isfinite(value)
    require(finite and value >= least, field, f"must be a finite number of at least {least:g}, got {value!r}")
    require(value <= most, field, f"must be at most {most:,.0f}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """``nodes`` servers with ``ranks_per_node`` decode ranks each.

    ``lockstep``: the ranks share collectives in the forward (expert parallel) and step together; otherwise each rank
    steps alone. ``node_router`` sends requests to nodes, ``rank_balance`` picks the rank within the node. Each of a
    node's ``api_servers_per_node`` processes balances what it happens to accept, knowing only its own picks.
    """

    nodes: int = 1
    ranks_per_node: int = 1
    api_servers_per_node: int = 1
    lockstep: bool = True
    node_router: NodeRouter = "round_robin"
    rank_balance: RankBalance = "hybrid"

    def __post_init__(self) -> None:
        require_int(self.nodes, 1, "cluster.nodes")
        require_int(self.ranks_per_node, 1, "cluster.ranks_per_node")
        require_int(self.api_servers_per_node, 1, "cluster.api_servers_per_node")
        require_choice(self.node_router, ("round_robin",), "cluster.node_router")
        require_choice(self.rank_balance, ("hybrid",), "cluster.rank_balance")

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Connector:
    """The KV connector that stands in for the prefill side: it fills a prompt's KV with a constant, or noise.

    ``fill_mean`` and ``fill_std`` are a record of the cluster: here no KV is filled, only the time for it is spent.
    """

    name: ConnectorName = "none"
    fill_mean: float = 0.015
    fill_std: float = 0.0

    def __post_init__(self) -> None:
        require_choice(self.name, ("none", "DecodeBenchConnector"), "connector.name")
        require(math.isfinite(self.fill_mean), "connector.fill_mean", "must be finite")
        _require_range(self.fill_std, 0.0, "connector.fill_std")
        if self.name == "none":
            for field_ in fields(self)[1:]:
                unchanged = getattr(self, field_.name) == field_.default
                require(unchanged, f"connector.{field_.name}", "needs name: DecodeBenchConnector, which fills KV")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """How long a step of the group takes, in milliseconds; all of it physical, none of it fitted to one load.

    A step that replays the captured decode graph: ``step_base_ms`` + ``per_busiest_row_ms`` for each row of the rank
    with the most rows + ``per_group_row_ms`` for each row of all ranks. A step that runs eagerly: ``eager_step_ms``
    stands in for the base; None (the default) is the same as the base, so that a cluster without graphs needs one
    number only. The rank that fills most KV adds ``fill_per_100k_tokens_ms`` per 100,000 tokens. ``jitter``: a step
    takes up to this fraction longer, drawn uniformly.

    The model charges rows, not prefill tokens: a chunk of 2,000 prompt tokens costs what a decode row costs. It is
    meant for decode clusters, whose prompts a connector fills.
    """

    model: CostName = "linear"
    step_base_ms: float = 20.0
    per_busiest_row_ms: float = 1.0
    per_group_row_ms: float = 0.0
    fill_per_100k_tokens_ms: float = 0.0
    eager_step_ms: float = None  # type: ignore[assignment]  # replaced by the base below, so always a number to readers
    jitter: float = 0.0

    def __post_init__(self) -> None:
        require_choice(self.model, ("linear",), "cost.model")
        if self.eager_step_ms is None:
            object.__setattr__(self, "eager_step_ms", self.step_base_ms)
        require(self.step_base_ms > 0, "cost.step_base_ms", f"must be above 0, got {self.step_base_ms!r}")
        require(self.eager_step_ms > 0, "cost.eager_step_ms", f"must be above 0, got {self.eager_step_ms!r}")
        for field_ in fields(self):
            if field_.name != "model":
                most = MOST_JITTER if field_.name == "jitter" else MOST_MS
                _require_range(getattr(self, field_.name), 0.0, f"cost.{field_.name}", most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """One-way delays between client and server, in milliseconds."""

    request_ms: float = 0.0
    response_ms: float = 0.0

    def __post_init__(self) -> None:
        _require_range(self.request_ms, 0.0, "network.request_ms", MOST_MS)
        _require_range(self.response_ms, 0.0, "network.response_ms", MOST_MS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeds:
    """The workload seed of run i: base + stride x i, plus the whole part of the request rate if asked for."""

    base: int = 0
    add_request_rate: bool = False
    stride: int = 1000

    def __post_init__(self) -> None:
        require_int(self.base, 0, "seeds.base")
        require_int(self.stride, 1, "seeds.stride")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedCell:
    """Measurements of the real cluster at one value of the swept key, for one variant."""

    at: float
    variant: str
    p50_itl_ms: float | None = None
    p99_itl_ms: float | None = None
    p50_ttft_ms: float | None = None
    p99_ttft_ms: float | None = None

    def __post_init__(self) -> None:
        stated = [getattr(self, name) for name in MEASURES]
        require(any(v is not None for v in stated), "observed.cells", f"state at least one of {', '.join(MEASURES)}")
        for name, value in zip(MEASURES, stated, strict=True):
            require(value is None or value > 0, f"observed.cells.{name}", f"must be above 0, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What the real cluster showed: ``vary`` and ``sweep`` are the keys whose values the cells name."""

    source: str
    vary: str
    sweep: str
    cells: tuple[ObservedCell, ...]

    def __post_init__(self) -> None:
        require(len(self.cells) > 0, "observed.cells", "must not be empty")
        first: dict[tuple[float, str], int] = {}
        for i, cell in enumerate(self.cells):
            same = first.setdefault((cell.at, cell.variant), i)
            where = f"at {cell.at:g}, variant {cell.variant}"
            require(same == i, f"observed.cells[{i}]", f"repeats observed.cells[{same}]: {where}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that decides a simulated run, except its number.

    ``snapshot_ms``: how often a front end learns its ranks' queue lengths, at least 1. ``workload.seed`` is set per
    run, from ``seeds``. What a simulation could only ignore is refused: there is no model, so drafts are accepted at
    synthetic rates and no end-of-sequence token is ever sampled.
    """

    name: str
    description: str = ""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    graphs: GraphConfig = field(default_factory=GraphConfig)
    cluster: Cluster = field(default_factory=Cluster)
    connector: Connector = field(default_factory=Connector)
    workload: Workload = field(default_factory=Workload)
    seeds: Seeds = field(default_factory=Seeds)
    cost: Cost = field(default_factory=Cost)
    network: Network = field(default_factory=Network)
    snapshot_ms: float = 100.0
    observed: Observed | None = None

    def __post_init__(self) -> None:
        require(bool(self.name), "name", "must not be empty")
        _require_range(self.snapshot_ms, 1.0, "snapshot_ms")
        require(self.workload.seed == 0, "workload.seed", "set seeds.base instead: the seed differs from run to run")
        self.engine  # noqa: B018 - cross-checked here, so that a bad scenario fails when it is read
        longest, limit = self.workload.longest, self.scheduler.max_model_len
        require(
            longest <= limit,
            "scheduler.max_model_len",
            f"the workload draws requests of up to {longest} tokens, more than {limit}",
        )
        self._check_honoured()
        if self.observed is not None:
            for name in ("vary", "sweep"):
                key = getattr(self.observed, name)
                require(has_path(Scenario, key), f"observed.{name}", f"{key!r} is not a field of the scenario")
        self.seed(0)

    def _check_honoured(self) -> None:
        """Refuse what cannot change a simulated run, where another value would suggest that it does."""
        spec = self.speculation
        require(
            spec.num_speculative_tokens == 0 or spec.rejection_sample_method == "synthetic",
            "speculation.rejection_sample_method",
            "must be synthetic when num_speculative_tokens > 0: the laboratory has no model to verify drafts with",
        )
        require(
            self.graphs.mode != "NONE" or self.graphs.capture_sizes is None,
            "graphs.capture_sizes",
            "with mode NONE nothing is captured: set it to null, or the mode to FULL_DECODE_ONLY",
        )
        require(
            self.workload.ignore_eos,
            "workload.ignore_eos",
            "must be true: the laboratory has no model, so no end-of-sequence token is ever sampled",
        )

    @property
    def engine(self) -> EngineConfig:
        """One rank's configuration."""
        return EngineConfig(
            scheduler=self.scheduler, cache=self.cache, speculation=self.speculation, graphs=self.graphs
        )

    def seed(self, run: int) -> int:
        """The seed of run ``run`` (from 0)."""
        rate = self.workload.request_rate
        add = int(rate) if self.seeds.add_request_rate and math.isfinite(rate) else 0
        seed = self.seeds.base + add + self.seeds.stride * run
        require(seed < 2**32, "seeds", f"run {run} would have the seed {seed}, at most 2**32 - 1 is possible")
        return seed

    def workload_of(self, run: int) -> Workload:
        """The load of run ``run``, with its seed."""
        return replace(self.workload, seed=self.seed(run))


def scenario_from(raw: Mapping[str, Any]) -> Scenario:
    """Build a scenario from plain data. Raises `ConfigError` with the dotted name of the field at fault."""
    if isinstance(workload := raw.get("workload"), Mapping) and "seed" in workload:
        raise ConfigError("workload.seed", "set seeds.base instead: the seed differs from run to run")
    scenario = build(Scenario, raw, "")
    assert isinstance(scenario, Scenario)
    return scenario


def to_plain(scenario: Scenario) -> dict[str, Any]:
    """The scenario with all its defaults, as data that `scenario_from` takes back."""
    plain: dict[str, Any] = as_plain(scenario)
    del plain["workload"]["seed"]
    return plain


def with_seed(raw: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """A copy of plain scenario data whose run 0 has exactly ``seed``."""
    return set_path(set_path(raw, "seeds.base", seed), "seeds.add_request_rate", False)


def shipped() -> dict[str, str]:
    """The scenarios that come with the package: name to description, sorted by name."""
    return {name: str(load_raw(name).get("description", "")) for name in _shipped_names()}


def load_raw(name_or_path: str) -> dict[str, Any]:
    """Plain data of a shipped scenario or a YAML file. Raises `ConfigError` if there is none or it is not YAML."""
    names = _shipped_names()
    if name_or_path in names:
        text = resources.files("paceline.sim").joinpath(f"scenarios/{name_or_path}.yaml").read_text("utf-8")
        return read_yaml(text, name_or_path)
    path = Path(name_or_path)
    if not path.is_file():
        raise ConfigError(
            "scenario", f"no file {name_or_path!r}, and no shipped scenario of that name; shipped: {', '.join(names)}"
        )
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(name_or_path, f"is not UTF-8 text: {error.reason} at byte {error.start}") from None
    return read_yaml(text, name_or_path)


def load(name_or_path: str, overrides: Mapping[str, object] | None = None) -> Scenario:
    """A shipped scenario by name, or one in a YAML file, with the fields in ``overrides`` (dotted names) set."""
    raw = load_raw(name_or_path)
    for key, value in (overrides or {}).items():
        raw = set_path(raw, key, value)
    return scenario_from(raw)


def _shipped_names() -> list[str]:
    folder = resources.files("paceline.sim").joinpath("scenarios")
    return sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml"))
