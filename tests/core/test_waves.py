# SPDX-License-Identifier: Apache-2.0
"""Waves: every interleaving of two ranks, and of three with fewer messages, in a model around `core.lockstep.Wave`.

Each rank has an inbox that others may fill at any time and that it reads only when it begins a step or sleeps.
Wake messages travel from rank to rank in order, arrive when they like, and may arrive twice. Requests and aborts
come from outside. A request runs for one step; a *loading* one has no row until its transfer arrives.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from paceline.core.graphs import FULL, NONE, GraphDispatcher
from paceline.core.lockstep import POLL, RUN, SLEEP, OutOfStep, Vote, Wave, agree

from .driving import engine_config

GRAPHS = GraphDispatcher(engine_config(K=3))
BEGIN, VOTED, ASLEEP = "begin", "voted", "asleep"


class Inbox(NamedTuple):
    """Messages not read yet. Their order within one reading decides nothing but that an abort follows its request."""

    requests: int = 0
    loads: int = 0
    aborts: int = 0
    wakes: tuple[int, ...] = ()


class RankState(NamedTuple):
    """``result``: the agreement of the step it voted in, once everybody has voted: (run, step), not yet read."""

    wave: int
    awake: bool
    phase: str
    step: int
    requests: int
    loads: int
    inbox: Inbox
    vote: tuple[int, bool] | None
    result: int | None


class World(NamedTuple):
    """``wires``: wake messages under way, by (from, to). The rest is what the outside may still do."""

    ranks: tuple[RankState, ...]
    wires: tuple[tuple[tuple[int, int], tuple[int, ...]], ...]
    requests_left: int
    loads_left: int
    aborts_left: int
    duplicates_left: int


SYSTEM, OUTSIDE, POLLING = "system", "outside", "polling"
Move = tuple[str, World]


class Model:
    """All moves of a world; ``wave_type`` lets the tests plant a rule that is known to be wrong."""

    def __init__(self, wave_type: type[Wave] = Wave) -> None:
        self.wave_type = wave_type

    def start(self, ranks: int, *, requests: int, loads: int = 0, aborts: int = 0, duplicates: int = 0) -> World:
        first = RankState(0, True, BEGIN, 0, 0, 0, Inbox(), None, None)
        wires = tuple(((a, b), ()) for a in range(ranks) for b in range(ranks) if a != b)
        return World((first,) * ranks, wires, requests, loads, aborts, duplicates)

    def moves(self, w: World) -> Iterator[Move]:
        for i, rank in enumerate(w.ranks):
            yield from self.outside(w, i)
            if rank.phase == BEGIN:
                yield SYSTEM, self.begin(w, i)
            elif rank.phase == VOTED and rank.result is not None:
                yield (POLLING if rank.result == POLL else SYSTEM), self.collect(w, i)
            elif rank.phase == ASLEEP and rank.inbox != Inbox():
                yield SYSTEM, self.read_asleep(w, i)
            if rank.loads:  # a transfer ends
                yield SYSTEM, put(w, i, rank._replace(loads=rank.loads - 1, requests=rank.requests + 1))
        for key, wire in w.wires:
            if wire:
                yield SYSTEM, self.deliver(w, key, keep=False)
                if w.duplicates_left:
                    duplicated = w._replace(duplicates_left=w.duplicates_left - 1)
                    yield OUTSIDE, self.deliver(duplicated, key, keep=True)

    def outside(self, w: World, i: int) -> Iterator[Move]:
        inbox = w.ranks[i].inbox
        if w.requests_left:
            more = inbox._replace(requests=inbox.requests + 1)
            yield OUTSIDE, self.post(w._replace(requests_left=w.requests_left - 1), i, more)
        if w.loads_left:
            more = inbox._replace(loads=inbox.loads + 1)
            yield OUTSIDE, self.post(w._replace(loads_left=w.loads_left - 1), i, more)
        if w.aborts_left:
            more = inbox._replace(aborts=inbox.aborts + 1)
            yield OUTSIDE, self.post(w._replace(aborts_left=w.aborts_left - 1), i, more)

    def post(self, w: World, i: int, inbox: Inbox) -> World:
        return put(w, i, w.ranks[i]._replace(inbox=inbox))

    def deliver(self, w: World, key: tuple[int, int], *, keep: bool) -> World:
        wires = dict(w.wires)
        v, *rest = wires[key]
        if not keep:
            wires[key] = tuple(rest)
        inbox = w.ranks[key[1]].inbox
        w = w._replace(wires=tuple(wires.items()))
        return self.post(w, key[1], inbox._replace(wakes=tuple(sorted((*inbox.wakes, v)))))

    def wave_of(self, rank: RankState) -> Wave:
        wave = self.wave_type()
        wave.number, wave.awake = rank.wave, rank.awake
        return wave

    def begin(self, w: World, i: int) -> World:
        """Read the inbox, plan, vote; when the last vote is in, everybody has a result to read."""
        rank = w.ranks[i]
        wave = self.wave_of(rank)
        wave.at_begin(rank.inbox.wakes)
        rank = read(rank)
        has_work = bool(rank.requests or rank.loads)
        w = put(w, i, rank._replace(phase=VOTED, vote=(rank.requests, has_work)))
        if any(r.vote is None for r in w.ranks):
            return w
        votes = []
        for r in w.ranks:
            assert r.vote is not None
            rows, work = r.vote
            votes.append(Vote(r.step, r.wave, 4 * rows, rows, 4 if rows else 0, FULL if rows else NONE, work))
        run = agree(votes, GRAPHS).run
        return w._replace(ranks=tuple(r._replace(vote=None, result=run) for r in w.ranks))

    def collect(self, w: World, i: int) -> World:
        rank = w.ranks[i]
        step = rank.step + 1
        rank = rank._replace(result=None, phase=BEGIN, step=step)
        if w.ranks[i].result == RUN:
            rank = rank._replace(requests=0)
        if w.ranks[i].result == SLEEP:
            wave = self.wave_of(rank)
            wave.sleep()
            rank = rank._replace(phase=ASLEEP, awake=wave.awake)
            return self.read_asleep(put(w, i, rank), i)
        return put(w, i, rank)

    def read_asleep(self, w: World, i: int) -> World:
        """New work, even if an abort has taken it back already, begins the next wave and wakes the others."""
        rank = w.ranks[i]
        wave = self.wave_of(rank)
        inbox = rank.inbox
        send = wave.at_sleep(new_work=bool(inbox.requests or inbox.loads), wakes=inbox.wakes)
        rank = read(rank)._replace(wave=wave.number, awake=wave.awake, phase=BEGIN if wave.awake else ASLEEP)
        w = put(w, i, rank)
        if send is None:
            return w
        wires = tuple((key, (*wire, send) if key[0] == i else wire) for key, wire in w.wires)
        return w._replace(wires=wires)


def put(w: World, i: int, rank: RankState) -> World:
    return w._replace(ranks=(*w.ranks[:i], rank, *w.ranks[i + 1 :]))


def read(rank: RankState) -> RankState:
    """Take in the whole inbox; an abort for a request that is gone is old news."""
    requests, loads, aborts = rank.requests + rank.inbox.requests, rank.loads + rank.inbox.loads, rank.inbox.aborts
    gone = min(aborts, requests)
    return rank._replace(requests=requests - gone, loads=max(0, loads - aborts + gone), inbox=Inbox())


def normal(w: World) -> World:
    """Only differences of waves and steps matter: count both from the least."""
    wave, step = min(r.wave for r in w.ranks), min(r.step for r in w.ranks)
    ranks = tuple(
        r._replace(
            wave=r.wave - wave,
            step=r.step - step,
            inbox=r.inbox._replace(wakes=tuple(v - wave for v in r.inbox.wakes)),
        )
        for r in w.ranks
    )
    return w._replace(ranks=ranks, wires=tuple((key, tuple(v - wave for v in wire)) for key, wire in w.wires))


def under_way(w: World, to: int, v: int) -> bool:
    return v in w.ranks[to].inbox.wakes or any(key[1] == to and v in wire for key, wire in w.wires)


def check_waves(w: World) -> None:
    """If a rank is awake in wave v, every other is in v or v + 1, or in v - 1 with wake(v) unread or under way."""
    for a in w.ranks:
        for j, b in enumerate(w.ranks):
            if a.awake and b.wave != a.wave and b.wave != a.wave + 1:
                assert b.wave == a.wave - 1, w
                assert under_way(w, j, a.wave), w


def is_quiet(w: World) -> bool:
    """Everybody sleeps after the same wave, all that was asked is done, nothing is unread or under way."""
    return (
        len({(r.wave, r.step) for r in w.ranks}) == 1
        and all(r.phase == ASLEEP and not r.requests and not r.loads and r.inbox == Inbox() for r in w.ranks)
        and not any(wire for _, wire in w.wires)
    )


def explore(model: Model, start: World) -> int:
    """Visit every reachable world. Returns how many there are.

    Checked: the invariant everywhere; where nobody can move by himself all is quiet (no lost wake-up, nobody votes
    alone); and whatever the order of moves, that point is reached (no cycle without the outside, polling aside).
    """
    start = normal(start)
    graph: dict[World, list[World]] = {}
    todo = [start]
    while todo:
        w = todo.pop()
        if w in graph:
            continue
        check_waves(w)
        moves = [(kind, normal(after)) for kind, after in model.moves(w)]
        alone = [after for kind, after in moves if kind != OUTSIDE]
        assert alone or is_quiet(w), f"stuck: {w}"
        graph[w] = [after for kind, after in moves if kind == SYSTEM]
        todo += [after for _, after in moves if after not in graph]
    assert_no_cycle(graph)
    return len(graph)


def assert_no_cycle(graph: dict[World, list[World]]) -> None:
    done: set[World] = set()
    for root in graph:
        path: set[World] = set()
        stack: list[tuple[World, Iterator[World]]] = [] if root in done else [(root, iter(graph[root]))]
        path.update(w for w, _ in stack)
        while stack:
            w, rest = stack[-1]
            after = next(rest, None)
            if after is None:
                stack.pop()
                path.discard(w)
                done.add(w)
            elif after not in done:
                assert after not in path, f"steps for ever: {after}"
                path.add(after)
                stack.append((after, iter(graph[after])))


@pytest.mark.parametrize(
    ("ranks", "outside"),
    [
        (1, {"requests": 3, "loads": 1, "aborts": 2}),
        (2, {"requests": 3, "aborts": 1}),
        (2, {"requests": 2, "aborts": 1, "duplicates": 1}),
        (2, {"requests": 1, "loads": 1, "aborts": 1, "duplicates": 1}),
        (3, {"requests": 2}),
        pytest.param(2, {"requests": 2, "loads": 1, "aborts": 1, "duplicates": 1}, marks=pytest.mark.long),
        pytest.param(3, {"requests": 2, "aborts": 1}, marks=pytest.mark.long),
        pytest.param(3, {"requests": 2, "duplicates": 1}, marks=pytest.mark.long),
        pytest.param(3, {"requests": 1, "loads": 1}, marks=pytest.mark.long),
    ],
)
def test_in_every_order_of_events_all_ranks_wake_work_and_sleep_together(ranks: int, outside: dict[str, int]) -> None:
    model = Model()
    assert explore(model, model.start(ranks, **outside)) > 1000


class ObeysStaleWakes(Wave):
    """Wrong: wakes at any wake message."""

    def at_sleep(self, *, new_work: bool, wakes: object) -> int | None:
        stale = bool(wakes)
        return super().at_sleep(new_work=new_work or stale, wakes=())


class TellsNobody(Wave):
    """Wrong: begins a wave without waking the others."""

    def at_sleep(self, *, new_work: bool, wakes: tuple[int, ...]) -> int | None:  # type: ignore[override]
        super().at_sleep(new_work=new_work, wakes=wakes)
        return None


class CountsItsOwnWaves(Wave):
    """Wrong: a woken rank does not take over the wave's number."""

    def at_sleep(self, *, new_work: bool, wakes: tuple[int, ...]) -> int | None:  # type: ignore[override]
        sent = super().at_sleep(new_work=new_work, wakes=wakes)
        if sent is None and self.awake:
            self.number -= 1
        return sent


@pytest.mark.parametrize("wrong", [ObeysStaleWakes, TellsNobody, CountsItsOwnWaves])
def test_the_model_finds_rules_that_are_known_to_be_wrong(wrong: type[Wave]) -> None:
    model = Model(wrong)
    with pytest.raises((AssertionError, OutOfStep)):
        explore(model, model.start(2, requests=2, duplicates=1))


def test_an_abort_alone_wakes_nobody() -> None:
    wave = Wave()
    wave.sleep()
    assert wave.at_sleep(new_work=False, wakes=()) is None
    assert (wave.awake, wave.number) == (False, 0)


def test_old_wakes_are_dropped_and_wakes_from_the_future_are_fatal() -> None:
    wave = Wave()
    wave.at_begin([0])
    with pytest.raises(OutOfStep, match=r"wake\(1\)"):
        wave.at_begin([0, 1])
    wave.sleep()
    assert wave.at_sleep(new_work=False, wakes=[0]) is None
    assert not wave.awake
    with pytest.raises(OutOfStep, match=r"wake\(2\)"):
        wave.at_sleep(new_work=False, wakes=[2])
    assert wave.at_sleep(new_work=False, wakes=[0, 1]) is None
    assert (wave.awake, wave.number) == (True, 1)
    wave.at_begin([0, 1, 1])


def test_new_work_names_the_wave_that_it_begins_even_if_a_peer_was_first() -> None:
    wave = Wave()
    wave.sleep()
    assert wave.at_sleep(new_work=True, wakes=[1]) == 1
    assert (wave.awake, wave.number) == (True, 1)
