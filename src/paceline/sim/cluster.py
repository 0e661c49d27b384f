# SPDX-License-Identifier: Apache-2.0
"""A whole decode cluster on a virtual clock: client, router, balancers, and the very ranks that serve for real."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.random import SeedSequence, default_rng

from paceline.connectors.decode_bench.scheduler import DecodeBenchScheduler
from paceline.core.balance import RankBalancer, RankLoad, RoundRobin
from paceline.core.graphs import FULL, GraphDispatcher
from paceline.core.lockstep import POLL, RUN, SLEEP
from paceline.core.plan import StepOutput
from paceline.core.request import Request, SamplingParams
from paceline.core.results import RequestRecord, summarise
from paceline.core.scheduler import Scheduler
from paceline.core.verifier import AcceptanceStats
from paceline.core.workload import Job, generate, generate_warmups
from paceline.engine.collector import collector_paused
from paceline.engine.group import Group
from paceline.engine.rank import Rank
from paceline.sim.client import Client
from paceline.sim.clock import EventLoop
from paceline.sim.cost import CostModel, LinearCost
from paceline.sim.executor import SimExecutor
from paceline.sim.scenario import Scenario


class SimulationStuck(RuntimeError):
    """Somebody has work, nobody can run it, and nothing is pending that could change that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """One simulated run. Latencies are per chunk where streams carry several tokens (ITL); shares are 0 to 1.

    Everything but ``busy_rank_steps``, which is about speed, is about the measured requests, warm-ups excluded.
    ``full_step_share``: of the group steps with rows, those that replayed a graph. ``misses``: rank-steps that were
    not uniform W, by reason. ``trace_hash`` covers every step's shape and end, and every chunk's time.
    """

    seed: int
    p50_itl_ms: float
    p99_itl_ms: float
    p50_ttft_ms: float
    p99_ttft_ms: float
    completed: int
    failed: int
    acceptance_length: float
    full_step_share: float
    misses: dict[str, int]
    group_steps: int
    busy_rank_steps: int
    idle_rank_admissions: int
    sim_duration_s: float
    trace_hash: str


class StepTally:
    """What a driver counts over all steps of its group, and a hash that any difference would change."""

    __slots__ = ("full_steps", "steps", "trace")

    def __init__(self) -> None:
        self.steps = 0
        self.full_steps = 0
        self.trace = 0


class GroupDriver:
    """Takes one group through its steps on the virtual clock: collect at launch + cost."""

    def __init__(
        self,
        loop: EventLoop,
        group: Group,
        cost: CostModel,
        deliver: Callable[[int, list[StepOutput]], None],
        first_rank: int,
    ) -> None:
        self.loop = loop
        self.group = group
        self.cost = cost
        self.tally = StepTally()
        self._deliver = deliver
        self._first_rank = first_rank
        self._running = False

    def wake(self) -> None:
        """There is new work: begin a step now unless one is in flight."""
        if not self._running:
            self._running = True
            self.group.wake()
            self.loop.at(self.loop.now, self._begin)

    def _begin(self) -> None:
        loop, group = self.loop, self.group
        agreement = group.begin(loop.now)
        if agreement.run == RUN:
            tally = self.tally
            end = loop.now + self.cost.step_s(group.plans, agreement)
            tally.steps += 1
            if agreement.mode == FULL:
                tally.full_steps += 1
            # a hash of numbers only, which PYTHONHASHSEED does not touch
            tally.trace = hash((tally.trace, agreement.mode, agreement.tokens_by_rank, end))
            loop.at(end, self._end)
        elif agreement.run == POLL:
            if not any(plan.retired or plan.load_meta for plan in group.plans):
                raise SimulationStuck(f"at {loop.now:.3f} s no rank can run its requests and no transfer is pending")
            loop.at(loop.now, self._end)
        else:
            assert agreement.run == SLEEP
            self._running = False

    def _end(self) -> None:
        now = self.loop.now
        deliver = self._deliver
        for i, outputs in enumerate(self.group.finish(now), self._first_rank):
            if outputs:
                deliver(i, outputs)
        self._begin()


class _Flight(NamedTuple):
    """A request under way, and who must hear of its end."""

    request: Request
    record: RequestRecord
    client: Client
    balancer: RankBalancer
    local_rank: int


class Cluster:
    """The servers of a scenario: ranks in one lock-step group or in groups of one, nodes that balance their own."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.loop = EventLoop()
        shape = scenario.cluster
        config = scenario.engine
        *streams_of_ranks, accept = SeedSequence(seed).spawn(2 * shape.ranks + 1)
        streams = iter(streams_of_ranks)
        self._accept = default_rng(accept)
        graphs = GraphDispatcher(config)
        self.ranks: list[Rank] = []
        for _ in range(shape.ranks):
            connector = None
            if scenario.connector.name == "DecodeBenchConnector":
                connector = DecodeBenchScheduler(config.cache.block_size)
            executor = SimExecutor(config.speculation, default_rng(next(streams)))
            self.ranks.append(Rank(Scheduler(config, connector), executor, graphs))
        size = shape.ranks if shape.lockstep else 1
        self.drivers: list[GroupDriver] = []
        for first in range(0, shape.ranks, size):
            group = Group(self.ranks[first : first + size], graphs)
            cost = LinearCost(scenario.cost, default_rng(next(streams)))
            self.drivers.append(GroupDriver(self.loop, group, cost, self._deliver, first))
        self._group_size = size
        self._nodes = RoundRobin(shape.nodes)
        servers = shape.api_servers_per_node
        self._balancers = [
            [RankBalancer(shape.ranks_per_node, clients=servers, client_index=i) for i in range(servers)]
            for _ in range(shape.nodes)
        ]
        self._appends: dict[str, Callable[[float], None]] = {}
        self._flights: dict[str, _Flight] = {}
        self._snapshots_on = False
        self._next_id = 0
        self._request_s = scenario.network.request_ms / 1000
        self._response_s = scenario.network.response_ms / 1000

    def send(self, job: Job, record: RequestRecord, client: Client) -> None:
        """A client's request on its way to the router."""
        workload = self.scenario.workload
        params = SamplingParams(max_tokens=job.output_len, temperature=0.0, ignore_eos=workload.ignore_eos)
        self._next_id += 1
        request = Request(str(self._next_id), job.source(workload.vocab_size), params, arrival=self.loop.now)
        if self._request_s:
            self.loop.at(self.loop.now + self._request_s, lambda: self._arrive(request, record, client))
        else:
            self._arrive(request, record, client)

    def _arrive(self, request: Request, record: RequestRecord, client: Client) -> None:
        node = self._nodes.pick()
        servers = self._balancers[node]
        balancer = servers[int(self._accept.integers(len(servers)))]  # whichever process accepts the connection
        local = balancer.pick()
        rank = node * self.scenario.cluster.ranks_per_node + local
        self._appends[request.id] = record.chunk_s.append
        self._flights[request.id] = _Flight(request, record, client, balancer, local)
        self.ranks[rank].add(request)
        self.drivers[rank // self._group_size].wake()
        if not self._snapshots_on:
            self._snapshots_on = True
            self.loop.at(self.loop.now + self.scenario.snapshot_ms / 1000, self._snapshot)

    def _snapshot(self) -> None:
        """Every rank publishes its queues, while there is anything to publish."""
        per_node = self.scenario.cluster.ranks_per_node
        for node, servers in enumerate(self._balancers):
            schedulers = [rank.scheduler for rank in self.ranks[node * per_node : (node + 1) * per_node]]
            loads = [RankLoad(s.num_waiting, s.num_running, s.kv_usage) for s in schedulers]
            for balancer in servers:
                balancer.snapshot(loads)
        if self._flights:
            self.loop.at(self.loop.now + self.scenario.snapshot_ms / 1000, self._snapshot)
        else:
            self._snapshots_on = False

    def _deliver(self, rank: int, outputs: list[StepOutput]) -> None:
        """Chunks on their way to the clients."""
        at = self.loop.now + self._response_s
        appends = self._appends
        for output in outputs:
            if output.token_ids:
                appends[output.request_id](at)
            if output.finish_reason is not None:
                self._ended(output.request_id, output.finish_reason, output.error)

    def _ended(self, request_id: str, reason: str, error: str | None) -> None:
        flight = self._flights.pop(request_id)
        del self._appends[request_id]
        flight.record.output_tokens = len(flight.request.output)
        if reason in ("error", "abort"):
            flight.record.error = error or reason
        flight.balancer.done(flight.local_rank)
        if self._response_s:
            self.loop.at(self.loop.now + self._response_s, flight.client.ended)
        else:
            flight.client.ended()


class _Marks:
    """The counters of a cluster at one moment, so that warm-ups can be taken out of a report."""

    def __init__(self, cluster: Cluster) -> None:
        self.steps = sum(d.tally.steps for d in cluster.drivers)
        self.full_steps = sum(d.tally.full_steps for d in cluster.drivers)
        self.busy = sum(r.scheduler.stats.busy_steps for r in cluster.ranks)
        self.idle_admissions = sum(r.scheduler.stats.idle_admissions for r in cluster.ranks)
        self.misses: Counter[str] = Counter()
        self.acceptance = AcceptanceStats(cluster.scenario.speculation.num_speculative_tokens)
        for rank in cluster.ranks:
            self.misses.update(rank.scheduler.stats.misses)
            self.acceptance.add(rank.scheduler.stats.acceptance)


def simulate(scenario: Scenario, run: int = 0) -> RunReport:
    """Run number ``run`` of a scenario: warm-ups to their end, then the measured requests to theirs.

    Raises:
        SimulationStuck: the cluster came to a stop with unfinished requests.
    """
    with collector_paused():
        return _simulate(scenario, run)


def _simulate(scenario: Scenario, run: int) -> RunReport:
    workload = scenario.workload_of(run)
    cluster = Cluster(scenario, workload.seed)
    marks: list[_Marks] = []

    def client_of(jobs: list[Job], done: Callable[[], None]) -> Client:
        client = Client(
            cluster.loop, jobs, workload.max_concurrency, lambda job, record: cluster.send(job, record, client), done
        )
        return client

    def begin_measured() -> None:
        marks.append(_Marks(cluster))
        measured.start()

    measured = client_of(generate(workload), lambda: None)
    warmups = client_of(generate_warmups(workload), begin_measured)
    warmups.start()
    cluster.loop.run()
    if len(marks) != 1 or measured.left:
        raise SimulationStuck("the run ended before all of its requests did")
    return _report(scenario, workload.seed, cluster, measured, marks[0])


def _report(scenario: Scenario, seed: int, cluster: Cluster, measured: Client, before: _Marks) -> RunReport:
    after = _Marks(cluster)
    duration = measured.end_s - measured.start_s
    summary = summarise(measured.records, duration, percentiles=(50.0, 99.0))
    acceptance = after.acceptance
    acceptance.accepted_lengths = [
        a - b for a, b in zip(acceptance.accepted_lengths, before.acceptance.accepted_lengths, strict=True)
    ]
    steps = after.steps - before.steps
    return RunReport(
        seed=seed,
        p50_itl_ms=summary.itl.p(50.0),
        p99_itl_ms=summary.itl.p(99.0),
        p50_ttft_ms=summary.ttft.p(50.0),
        p99_ttft_ms=summary.ttft.p(99.0),
        completed=summary.completed,
        failed=summary.failed,
        acceptance_length=acceptance.acceptance_length,
        full_step_share=(after.full_steps - before.full_steps) / steps if steps else 0.0,
        misses=dict(sorted((after.misses - before.misses).items())),
        group_steps=steps,
        busy_rank_steps=after.busy,
        idle_rank_admissions=after.idle_admissions - before.idle_admissions,
        sim_duration_s=duration,
        trace_hash=_trace_hash(cluster, measured),
    )


def _trace_hash(cluster: Cluster, measured: Client) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for driver in cluster.drivers:
        digest.update(b"%d:%d:%d;" % (driver.tally.steps, driver.tally.full_steps, driver.tally.trace))
    for record in measured.records:
        digest.update(np.asarray([record.sent_s, *record.chunk_s]).tobytes())
    return digest.hexdigest()
