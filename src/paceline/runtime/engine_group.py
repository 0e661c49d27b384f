# SPDX-License-Identifier: Apache-2.0
"""The engine processes of one server, held by the process that serves them: one per data-parallel rank.

All send to one outbox, and say which rank they are; each has an inbox of its own. What they need to find each other
lies in one temporary folder, or at an address where ranks of other machines look as well.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from paceline.engine.line import JOIN_TIMEOUT_S
from paceline.engine.messages import Arrival, Dead, ModelInfo, Ready, decode_from_engine
from paceline.runtime.arrivals import Arrivals
from paceline.runtime.engine_process import LAST_WORDS_MS, POLL_MS, EngineProcess, push_or_pull

CHECK_S = 0.05
"""How often to look after processes and nodes until all ranks are ready."""
STOP_TIMEOUT_S = 5.0
"""How long stopped engines may take to finish the step in flight before they are killed."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")


class EngineRefused(ValueError):
    """The engine cannot be built from these options; the message says why."""


class EngineFailed(RuntimeError):
    """An engine process ended by itself before all were ready."""


@dataclass(frozen=True, slots=True)
class Place:
    """What ``data_parallel`` among the options of an engine says of a server's ranks.

    ``size``: of their group. ``first``: which rank of it the first process is; None: the server of rank 0 says so.
    ``front``: ``host:port`` at which that server hears from ranks that other machines run for it. ``join_timeout_s``:
    how long all wait for the last to come. ``rest``: passed on to the engines.
    """

    size: int
    first: int | None
    front: str | None
    join_timeout_s: float
    rest: dict[str, Any]

    @classmethod
    def of(cls, options: Mapping[str, Any], ranks: int) -> Place:
        given = dict(options.get("data_parallel", {}))
        timeout_s = given.get("join_timeout_s", JOIN_TIMEOUT_S)
        return cls(given.pop("size", ranks), given.pop("first", 0), given.pop("front", None), timeout_s, given)

    @property
    def in_step(self) -> bool:
        """Whether ranks of the group keep step: they share experts, or are told to all the same."""
        return bool(self.rest.get("enable_expert_parallel") or self.rest.get("lockstep"))


def start_processes(
    factory: str,
    options: Mapping[str, Any],
    place: Place,
    names: Mapping[int, str],
    outbox: str,
    folder: Path,
) -> list[EngineProcess]:
    """Start engine processes; returns at once, while they load.

    Args:
        factory: ``module:function``, called in each child with its options as a dict.
        options: passed on, plain JSON data; each of several ranks finds in ``data_parallel`` where it belongs: what is
            given there, ``size``, ``rank``, ``inbox``, ``store``, and by ``local_rank`` and ``local_ranks`` its place
            among the processes here.
        names: rank in the group, and the file of the inbox in ``folder``, of each; the front knows them by the order.
        outbox: address of the front.
    """
    # The processes of one machine; what other machines' ranks have is theirs.
    environment = None if place.size == 1 or not names else shared_cores(os.environ, len(names))
    processes = []
    for number, (rank, name) in enumerate(names.items()):
        chosen, inbox = dict(options), f"ipc://{folder / name}"
        if place.size > 1:
            own = {"size": place.size, "rank": rank, "inbox": inbox, "store": str(folder / "store")}
            own |= {"local_rank": number, "local_ranks": len(names)}
            chosen["data_parallel"] = {**own, **place.rest}
        spec = {
            "factory": factory,
            "options": chosen,
            "rank": number if place.front is None else rank,
            "inbox": inbox,
            "outbox": outbox,
            "folder": str(folder),
            # Where ranks and fronts on other machines are; this one is reached from there by the same way.
            "reach": place.front or place.rest.get("store"),
            # Of one engine alone its parent sees that it has died, and nobody else waits for it.
            "beats": place.size > 1,
        }
        processes.append(EngineProcess(spec, environment))
    return processes


class EngineGroup:
    """Engine processes, from their start to their end, and the ranks that other machines run for this server.

    ``size``: ranks of the group, those with servers of their own included. ``first_rank``: which rank of it the
    first process is. ``outbox``: where all are heard. ``needed_elsewhere``: whether ranks of other servers keep step
    with these, and cannot go on without them.
    """

    def __init__(self, factory: str, options: Mapping[str, Any], ranks: int = 1) -> None:
        """Start the processes; returns at once, while the children load.

        Args:
            factory, options: see `start_processes`. ``data_parallel`` may say more of this server's ranks (`Place`),
                and where those of several servers meet: ``store``, the ``host:port`` at which rank 0 listens.
            ranks: how many processes to start here.
        """
        place = Place.of(options, ranks)
        self.size = place.size
        self.first_rank = place.first or 0
        self.front = place.front
        self._served = ranks if place.front is None else place.size
        self.needed_elsewhere = place.in_step and self._served < place.size
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-"))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.outbox = push_or_pull(self._context, zmq.PULL)
        outbox = f"ipc://{self._folder / 'outbox'}"
        self.outbox.bind(outbox)
        if place.front is not None:
            self._listen(place.front)
        self._inboxes: dict[int, zmq.Socket[bytes]] = {}
        for number in range(ranks):
            # The engine binds its inbox: a connecting socket queues what is sent before the other side is there.
            self._connect(number, f"ipc://{self._folder / f'inbox-{number}'}")
        names = {self.first_rank + number: f"inbox-{number}" for number in range(ranks)}
        self._arrivals = Arrivals(
            self._context, self._served, ranks, in_step=place.in_step, timeout_s=place.join_timeout_s
        )
        self._processes = start_processes(factory, options, place, names, outbox, self._folder)

    def _listen(self, front: str) -> None:
        try:
            self.outbox.bind(f"tcp://{front}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise EngineRefused(f"data_parallel_address: cannot listen at {front}: {error}") from None

    def _connect(self, number: int, address: str) -> None:
        inbox = push_or_pull(self._context, zmq.PUSH)
        inbox.connect(address)
        self._inboxes[number] = inbox

    def __len__(self) -> int:
        """Ranks among which this server shares requests out."""
        return self._served

    @property
    def inboxes(self) -> list[zmq.Socket[bytes]]:
        """Of all ranks that this server serves, by number; complete when they are ready."""
        return [self._inboxes[number] for number in sorted(self._inboxes)]

    @property
    def pids(self) -> list[int]:
        """Of the processes here, by rank."""
        return [process.pid for process in self._processes]

    @property
    def awaited(self) -> int:
        """Ranks that other machines are to run for this server."""
        return self._served - len(self._processes)

    def wait_ready(self) -> ModelInfo:
        """Wait until every engine takes requests.

        Raises:
            EngineRefused: the options cannot be honoured, or the ranks differ.
            EngineFailed: a process ended.
        """
        ready: dict[int, Ready] = {}
        missed: dict[int, str] = {}
        checked, was_wrong = time.monotonic(), False
        while len(ready) < len(self):
            if self.outbox.poll(POLL_MS):
                self._hear(ready, missed)
            if time.monotonic() - checked > CHECK_S:
                checked = time.monotonic()
                problem = self.problem(missed) or self._arrivals.problem()
                # One check later, since what a process said before it ended, and says more, may be under way.
                if problem is not None and was_wrong:
                    raise EngineFailed(problem)
                was_wrong = problem is not None
        self._arrivals.complete()
        return ready[0].model

    def _hear(self, ready: dict[int, Ready], missed: dict[int, str]) -> None:
        try:
            message = decode_from_engine(self.outbox.recv())
        except msgspec.DecodeError:
            raise EngineRefused("a rank speaks otherwise: it runs another version of paceline") from None
        if isinstance(message, Arrival):
            self.admit(message)
        elif self._arrivals.nobody_is(message.rank):
            return
        elif isinstance(message, Ready):
            self._welcome(message, ready)
        elif isinstance(message, Dead) and message.peer_lost:
            missed[message.rank] = message.reason
        elif isinstance(message, Dead):
            # Options are refused in the same words by every rank.
            where = "" if message.refused else self._prefix(message.rank)
            raise (EngineRefused if message.refused else EngineFailed)(where + message.reason)

    def admit(self, node: Arrival) -> None:
        """Answer a machine that would run ranks for this server."""
        self._arrivals.admit(node)

    def problem(self, missed: Mapping[int, str]) -> str | None:
        """How a process here has ended, if one has; ``missed``: what ranks said that missed another."""
        # Who ended for want of another is not the cause, unless nobody else is to be seen.
        gone = [rank for rank, process in enumerate(self._processes) if process.ended]
        for rank in sorted(gone, key=missed.__contains__):
            return self._prefix(rank) + missed.get(rank, self.epitaph(rank))
        return None

    def _welcome(self, message: Ready, ready: dict[int, Ready]) -> None:
        """A rank is ready: it must be one that is missing, and the same engine as the others."""
        rank = message.rank
        if rank in ready or not 0 <= rank < len(self):
            raise EngineRefused(f"data_parallel_start_rank: rank {rank} came twice, or is none of {len(self)}")
        if rank not in self._inboxes:
            self._connect(rank, message.inbox)
        ready[rank] = message
        first = next(iter(ready.values()))
        if first.version != message.version:
            raise EngineRefused(f"ranks differ in version: {first.version} and {message.version}")
        for name in ModelInfo.__struct_fields__:
            ours, theirs = getattr(first.model, name), getattr(message.model, name)
            if ours != theirs:
                values = "" if name == "tokenizer" else f": {ours!r} and {theirs!r}"
                raise EngineRefused(f"ranks {first.rank} and {rank} differ in {name}{values}; they must be equal")

    def watch(self, ended: Callable[[int], None]) -> None:
        """Call ``ended`` with its rank, from another thread, for each process here that has ended."""
        for rank, process in enumerate(self._processes):
            process.watch(lambda rank=rank: ended(rank))  # type: ignore[misc]

    def epitaph(self, rank: int) -> str:
        """How a process ended, in words."""
        if self.needed_elsewhere and self.ended_in_order(rank):
            return "the group was stopped through another of its servers"
        return self._processes[rank].epitaph()

    def ended_in_order(self, rank: int) -> bool:
        """Whether a rank that has ended was told to, perhaps by another server of its group."""
        return self._processes[rank].status == 0

    def _prefix(self, rank: int) -> str:
        return f"rank {self.first_rank + rank}: " if self.size > 1 else ""

    def stop(self, timeout_s: float | None = None) -> None:
        """End the processes, which `AsyncEngine.close` has told to stop or which need not be told; free everything.

        ``timeout_s``: how long requests of other servers, with whose ranks these keep step, may take to finish; None:
        as long as they need.
        """
        limit_s = timeout_s if self.needed_elsewhere else STOP_TIMEOUT_S
        ends = None if limit_s is None else time.monotonic() + limit_s
        if self.size == 1:
            self._processes[0].let_go()
        for process in self._processes:
            # In lock-step they leave together, so none is let go before the last has had its time.
            process.wait(None if ends is None else max(0.0, ends - time.monotonic()))
        self.kill()

    def kill_all(self) -> None:
        """End every process here at once, wherever it is; returns without waiting."""
        for process in self._processes:
            process.kill()

    def kill(self) -> None:
        """End every process here at once, and free everything. Ranks elsewhere end when they lose the connection."""
        self.kill_all()
        for process in self._processes:
            process.wait(STOP_TIMEOUT_S)
            process.let_go()
        self._context.destroy(linger=LAST_WORDS_MS if self.awaited else 0)
        shutil.rmtree(self._folder, ignore_errors=True)


def shared_cores(environment: Mapping[str, str], ranks: int) -> dict[str, str]:
    """``environment`` with the machine's cores shared out among ``ranks`` processes, one thread each at least.

    More threads than cores wait for each other at every operation. What the user has set is kept.
    """
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    return {**dict.fromkeys(THREAD_VARIABLES, threads), **environment}
