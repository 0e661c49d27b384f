# SPDX-License-Identifier: Apache-2.0
"""A cluster in virtual time: everything that is asked is answered, by the rank that balance says, in step or not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.core.plan import StepPlan
from paceline.core.request import Request
from paceline.core.results import RequestRecord
from paceline.core.workload import generate
from paceline.sim.client import Client
from paceline.sim.cluster import Cluster, SimulationStuck, simulate
from paceline.sim.scenario import Scenario, load, scenario_from

SHORT = {"workload.num_prompts": 60, "workload.num_warmups": 8}


def small(**overrides: Any) -> Scenario:
    """Two nodes of two ranks; every request has 100 prompt and 20 output tokens, unless said otherwise."""
    raw: dict[str, dict[str, Any]] = {
        "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 512},
        "cache": {"num_blocks": 400, "enable_prefix_caching": False},
        "speculation": {
            "method": "mtp", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [0.7, 0.49, 0.3382],
        },
        "graphs": {"mode": "FULL_DECODE_ONLY"},
        "cluster": {"nodes": 2, "ranks_per_node": 2},
        "workload": {"input_len": 100, "output_len": 20, "num_prompts": 40, "request_rate": 50},
    }  # fmt: skip
    for key, value in overrides.items():
        section, name = key.split("__")
        raw.setdefault(section, {})[name] = value
    return scenario_from({"name": "small", **raw})


def run_client(cluster: Cluster) -> Client:
    """Send the scenario's measured requests and run to the end."""
    scenario = cluster.scenario
    client = Client(
        cluster.loop,
        generate(scenario.workload_of(0)),
        scenario.workload.max_concurrency,
        lambda job, record: cluster.send(job, record, client),
        lambda: None,
    )
    client.start()
    cluster.loop.run()
    return client


@pytest.mark.parametrize("pad", ["off", "running", "resumed"])
def test_every_request_of_the_shipped_scenario_ends_well(pad: str) -> None:
    report = simulate(load("kimi_k3_dep16", {**SHORT, "speculation.pad_resumed": pad}))
    assert (report.completed, report.failed) == (60, 0)
    assert 2.4 < report.acceptance_length < 2.66
    assert 0 < report.p50_itl_ms <= report.p99_itl_ms
    assert 0 < report.p50_ttft_ms <= report.p99_ttft_ms
    assert report.group_steps > 0
    assert report.busy_rank_steps > 0
    if pad == "resumed":
        assert (report.full_step_share, report.misses) == (1.0, {})
    else:
        assert report.full_step_share < 1.0
        assert set(report.misses) == {"qlen_1_resumed"}
        assert report.misses["qlen_1_resumed"] >= report.idle_rank_admissions > 0


def test_an_eager_step_anywhere_in_the_group_is_felt_by_all() -> None:
    by_pad = {
        pad: simulate(load("kimi_k3_dep16", {**SHORT, "speculation.pad_resumed": pad, "cost.jitter": 0.0}))
        for pad in ("running", "resumed")
    }
    assert by_pad["resumed"].p99_itl_ms < 80 < 225 < by_pad["running"].p99_itl_ms


def test_nodes_take_turns_and_each_balances_its_own_ranks() -> None:
    cluster = Cluster(small(workload__request_rate="inf"), seed=1)
    taken: Counter[int] = Counter()
    order: list[int] = []
    for i, rank in enumerate(cluster.ranks):

        def add(request: Request, i: int = i, add: Any = rank.scheduler.add) -> None:
            taken[i] += 1
            order.append(i)
            add(request)

        rank.scheduler.add = add  # type: ignore[method-assign]
    run_client(cluster)
    assert taken == {0: 10, 1: 10, 2: 10, 3: 10}
    assert [i // 2 for i in order] == [0, 1] * 20, "round robin over the nodes"


def test_a_node_prefers_its_emptier_rank() -> None:
    cluster = Cluster(small(cluster__nodes=1, workload__output_range_ratio=0.9, workload__output_len=60), seed=1)
    client = run_client(cluster)
    assert all(r.ok for r in client.records)
    busy = [rank.scheduler.stats.generated_tokens for rank in cluster.ranks]
    assert min(busy) > 0.6 * max(busy)


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize("connector", ["none", "DecodeBenchConnector"])
@pytest.mark.parametrize("caching", [True, False])
def test_all_requests_end_with_all_their_tokens(caching: bool, connector: str, lockstep: bool) -> None:
    scenario = small(
        cluster__lockstep=lockstep, connector__name=connector, cache__enable_prefix_caching=caching,
        workload__range_ratio=0.5, workload__prefix_len=40,
    )  # fmt: skip
    cluster = Cluster(scenario, seed=3)
    client = run_client(cluster)
    jobs = generate(scenario.workload_of(0))
    assert sorted(r.output_tokens for r in client.records) == sorted(job.output_len for job in jobs)
    assert all(r.error is None for r in client.records)
    assert all(a < b for r in client.records for a, b in zip(r.chunk_s, r.chunk_s[1:], strict=False))
    for rank in cluster.ranks:
        assert rank.scheduler.kv_usage == 0
        assert not rank.has_work


def test_L7_ranks_that_share_no_collectives_step_alone() -> None:
    """One request: in step all four ranks run as many steps, three of them dummies; alone, three do nothing at all."""
    steps, launches = {}, {}
    for lockstep in (True, False):
        cluster = Cluster(small(cluster__lockstep=lockstep, workload__num_prompts=1), seed=2)
        launches[lockstep] = counted = [0] * 4
        for i, rank in enumerate(cluster.ranks):

            def launch(*args: Any, i: int = i, counted: list[int] = counted, to: Any = rank.executor.launch) -> None:
                counted[i] += 1
                to(*args)

            rank.executor = Spy(launch, rank.executor.collect)
        assert all(r.ok for r in run_client(cluster).records)
        steps[lockstep] = [driver.tally.steps for driver in cluster.drivers]
    assert len(set(launches[True])) == 1
    assert [n > 0 for n in launches[False]] == [True, False, False, False]
    assert (len(steps[True]), len(steps[False])) == (1, 4)
    assert steps[True][0] > 5
    assert steps[False][1:] == [0, 0, 0]


class Spy:
    """An executor seen from outside."""

    def __init__(self, launch: Any, collect: Any) -> None:
        self.launch = launch
        self.collect = collect


def test_a_prefill_on_one_rank_is_an_eager_step_for_the_others_only_in_step() -> None:
    reports = {
        lockstep: simulate(small(cluster__lockstep=lockstep, cost__step_base_ms=10.0, cost__eager_step_ms=100.0))
        for lockstep in (True, False)
    }
    assert reports[False].p50_itl_ms < 25 < 100 < reports[True].p50_itl_ms
    assert reports[False].full_step_share > reports[True].full_step_share


def test_the_client_limits_what_is_in_flight_and_warm_ups_are_not_reported() -> None:
    limited = small(workload__max_concurrency=3, workload__request_rate="inf", workload__num_warmups=12)
    cluster = Cluster(limited, seed=1)
    most = 0

    def count(rank: int, outputs: Sequence[Any], deliver: Any = cluster.drivers[0]._deliver) -> None:
        nonlocal most
        most = max(most, sum(r.scheduler.num_running + r.scheduler.num_waiting for r in cluster.ranks))
        deliver(rank, outputs)

    cluster.drivers[0]._deliver = count
    client = run_client(cluster)
    assert most <= 3
    assert all(r.ok for r in client.records)
    report = simulate(limited)
    assert report.completed == 40
    assert report.misses == {} or sum(report.misses.values()) <= report.busy_rank_steps


@pytest.mark.parametrize("network", [{"request_ms": 5.0}, {"response_ms": 7.0}])
def test_delays_of_the_network_are_seen_in_TTFT_alone(network: dict[str, float]) -> None:
    scenario = {"workload__request_rate": 2.0, "workload__num_prompts": 8, "cost__jitter": 0.0}
    delays = {f"network__{key}": value for key, value in network.items()}
    near, far = simulate(small(**scenario)), simulate(small(**scenario, **delays))
    assert far.p50_ttft_ms == pytest.approx(near.p50_ttft_ms + sum(network.values()))
    assert far.p50_itl_ms == pytest.approx(near.p50_itl_ms)


def test_the_linear_cost_of_a_step_is_what_a_chunk_takes() -> None:
    """One request alone: every step replays the graph, holds one row, and takes base + busiest + group."""
    report = simulate(
        small(
            workload__num_prompts=1,
            cluster__nodes=1,
            connector__name="DecodeBenchConnector",
            cost__jitter=0.0,
            cost__step_base_ms=20.0,
            cost__per_busiest_row_ms=2.0,
            cost__per_group_row_ms=0.5,
            cost__eager_step_ms=500.0,
            cost__fill_per_100k_tokens_ms=1000.0,
        )
    )
    assert report.p50_itl_ms == report.p99_itl_ms == pytest.approx(22.5)
    assert report.p50_ttft_ms == pytest.approx(22.5 + 99 * 0.01), "the fill of 99 tokens comes before the first step"


class SaysLater:
    """A connector that never has an answer."""

    def get_num_new_matched_tokens(self, request: Request, num_computed: int) -> tuple[None, bool]:
        return None, False

    def update_state_after_alloc(self, request: Request, blocks: Sequence[Sequence[int]], num_external: int) -> None:
        raise AssertionError("nothing was offered")

    def build_connector_meta(self, plan: StepPlan) -> None:
        return None

    def request_finished(self, request: Request, blocks: Sequence[Sequence[int]]) -> tuple[bool, None]:
        return False, None


def test_a_cluster_in_which_nothing_can_happen_any_more_is_stuck_not_slow() -> None:
    cluster = Cluster(small(), seed=1)
    for rank in cluster.ranks:
        rank.scheduler.connector = SaysLater()  # type: ignore[attr-defined]
    record = RequestRecord(prompt_len=100, intended_s=0.0, sent_s=0.0)
    (job, *_) = generate(cluster.scenario.workload_of(0))
    client = Client(cluster.loop, [], None, lambda job, record: None, lambda: None)
    cluster.send(job, record, client)
    with pytest.raises(SimulationStuck, match="no rank can run"):
        cluster.loop.run()


def test_simulated_time_is_that_of_the_load() -> None:
    report = simulate(small(workload__request_rate=10.0))
    assert math.isclose(report.sim_duration_s, 4.0, rel_tol=0.3), "40 requests at 10 a second"
