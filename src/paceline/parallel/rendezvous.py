# SPDX-License-Identifier: Apache-2.0
"""How ranks in lock-step find each other, and make sure that they are the same engine."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from paceline.core.config import ConfigError, require, require_int, require_seconds
from paceline.engine.line import JOIN_TIMEOUT_S, PeerLost, named
from paceline.parallel.gpus import backend_for, gpu_conflict, gpu_name
from paceline.parallel.interface import interface_of
from paceline.parallel.roll import SIGN_AFTER_S, first_line

ABSENCE_S = SIGN_AFTER_S + 0.2
"""How long a rank that has come to a collective may take to say so."""
FAILED = "failed"
"""Where the reason is left for which a meeting fails."""
LOOK_S = 0.05
LOOPBACK = "lo"
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1", "[::1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank belongs.

    ``store``: a file that all ranks see, or ``host:port`` at which rank 0 listens. ``inbox``: the address at which
    this rank hears from its peers. ``timeout_s``: how long a rank waits in a collective for the slowest;
    ``join_timeout_s``: for the others to come, and to load.
    """

    size: int
    rank: int
    store: str
    inbox: str
    timeout_s: float
    join_timeout_s: float = JOIN_TIMEOUT_S

    def __post_init__(self) -> None:
        require_int(self.size, 1, "data_parallel.size")
        require_int(self.rank, 0, "data_parallel.rank")
        require(self.rank < self.size, "data_parallel.rank", f"must be below {self.size}, got {self.rank}")
        require_seconds(self.timeout_s, "distributed_timeout_seconds")
        require_seconds(self.join_timeout_s, "data_parallel.join_timeout_s")


class Meeting:
    """The ranks of a group, from their meeting on; torch.distributed's default group is theirs."""

    def __init__(self, place: Place, device: torch.device | None = None) -> None:
        """Meet the others. ``device``: where this rank computes; None: on the CPU.

        Raises:
            ConfigError: the address cannot be reached, or listened at; the rank has come before; ranks share a GPU.
            PeerLost: the others did not come.
        """
        self.place = place
        self._store = _store(place)
        if self._store.add(f"came/{place.rank}", 1) != 1:
            raise ConfigError("data_parallel_rank", f"rank {place.rank} came twice; each rank is run once")
        device = device or torch.device("cpu")
        if (conflict := gpu_conflict(self._exchange("gpu", gpu_name(device), "come"))) is not None:
            raise ConfigError("device", self._told(conflict))
        # Where all share a host, collectives need no network; elsewhere peers reach this one as they reach its inbox.
        shared = place.store.startswith("/") or place.store.rpartition(":")[0] in LOOPBACK_HOSTS
        if (interface := LOOPBACK if shared else interface_of(place.inbox)) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        try:
            dist.init_process_group(
                backend_for(device),
                store=PrefixStore("group", self._store),
                rank=place.rank,
                world_size=place.size,
                # Until the first vote; the deadline of collectives holds from then on.
                timeout=timedelta(seconds=place.join_timeout_s),
            )
        except RuntimeError as error:
            raise PeerLost(f"the {place.size} ranks did not meet: {first_line(error)}") from error

    def compare(self, facts: Mapping[str, Any]) -> list[str]:
        """Wait for all ranks, and make sure that ``facts``, plain JSON data, are the same on all of them.

        Returns:
            The inboxes of the other ranks.

        Raises:
            ConfigError: they differ; the message names what, and where.
            PeerLost: a rank did not come.
        """
        told = self._exchange("facts", {"facts": facts, "inbox": self.place.inbox}, "load")
        for rank, other in enumerate(told):
            for name, ours, theirs in differences(told[0]["facts"], other["facts"]):
                reason = f"ranks 0 and {rank} differ in {name}: {ours!r} and {theirs!r}; they must be equal"
                raise ConfigError("data_parallel", self._told(reason))
        return [other["inbox"] for rank, other in enumerate(told) if rank != self.place.rank]

    def sign(self, what: str, number: int) -> None:
        """See `Roll`."""
        self._store.set(f"{what}/{self.place.rank}", str(number))

    def absent(self, what: str, number: int) -> str:
        """See `Roll`. A rank that has come signs within `SIGN_AFTER_S`, or when it fails as well."""
        found: list[list[int]] = []

        def look() -> None:
            # The store of several hosts lies in the process of rank 0, and may have ended with it.
            with contextlib.suppress(RuntimeError):
                self.sign(what, number)
                time.sleep(ABSENCE_S)
                keys = [f"{what}/{rank}" for rank in range(self.place.size)]
                came = [self._store.check([key]) and int(self._store.get(key)) >= number for key in keys]
                found.append([rank for rank, here in enumerate(came) if not here])

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(2 * ABSENCE_S)
        # One that is frozen does not answer, and nothing else would end the wait for it.
        late = [0] if thread.is_alive() else found[0] if found else []
        return f"; {named(late)} did not come: dead, frozen, or busy with something that does not end" if late else ""

    def _exchange(self, key: str, mine: Any, what: str) -> list[Any]:
        """Plain JSON data that each rank brings, in their order, once all have come to do ``what``.

        Raises:
            PeerLost: a rank did not.
        """
        with self._open():
            self._store.set(f"{key}/{self.place.rank}", json.dumps(mine))
            self._wait_for_all(key, what)
            return [json.loads(self._store.get(f"{key}/{rank}")) for rank in range(self.place.size)]

    def _wait_for_all(self, key: str, what: str) -> None:
        """Until every rank has set ``key``/rank, which says that it did ``what``.

        Raises:
            PeerLost: one has not, or has said why all must end.
        """
        place = self.place
        keys = [f"{key}/{rank}" for rank in range(place.size)]
        ends = time.monotonic() + place.join_timeout_s
        while not self._store.check(keys):
            # Who has seen all come, and found them at odds, may have said so since the look above; so will this rank.
            if self._store.check([FAILED]) and not self._store.check(keys):
                raise PeerLost(self._store.get(FAILED).decode())
            if time.monotonic() > ends:
                missing = [rank for rank, each in enumerate(keys) if not self._store.check([each])]
                if missing:
                    raise PeerLost(
                        self._told(
                            f"{named(missing)} of {place.size} did not {what} within {place.join_timeout_s:g} s;"
                            " each is run by one node (data_parallel_rank, data_parallel_start_rank)"
                        )
                    )
            time.sleep(LOOK_S)

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        """The store fails when rank 0 has gone, in whose process it may lie."""
        try:
            yield
        except PeerLost:
            raise
        except RuntimeError as error:
            raise PeerLost(f"rank 0 has ended the meeting at {self.place.store}: {first_line(error)}") from error

    def _told(self, reason: str) -> str:
        """``reason``, which ends all ranks, after the others have been told."""
        with contextlib.suppress(RuntimeError):
            self._store.set(FAILED, reason)
            if self.place.rank == 0:
                # The store of several hosts ends with this process.
                time.sleep(4 * LOOK_S)
        return reason


def differences(ours: Any, theirs: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """Where two nested pieces of JSON data differ: (dotted name, ours, theirs)."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found = []
        for key in sorted(ours.keys() | theirs.keys()):
            found += differences(ours.get(key), theirs.get(key), f"{name}.{key}" if name else key)
        return found
    return [] if ours == theirs else [(name, ours, theirs)]


def _store(place: Place) -> Store:
    if place.store.startswith("/"):
        store: Store = FileStore(str(Path(place.store)), place.size)
    else:
        host, _, port = place.store.rpartition(":")
        try:
            store = TCPStore(
                host,
                int(port),
                place.size,
                is_master=place.rank == 0,
                timeout=timedelta(seconds=place.join_timeout_s),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            hint = "; does another node run rank 0 as well (data_parallel_start_rank)?" if place.rank == 0 else ""
            reason = first_line(error) + hint
            raise ConfigError("data_parallel_rpc_port", f"no meeting at {place.store}: {reason}") from None
    store.set_timeout(timedelta(seconds=place.join_timeout_s))
    return store
