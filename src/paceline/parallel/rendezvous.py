# SPDX-License-Identifier: Apache-2.0
"""How ranks in lock-step find each other, and make sure that they are the same engine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from paceline.core.config import ConfigError, require, require_int, require_seconds
from paceline.engine.line import PeerLost
from paceline.parallel.votes import first_line

JOIN_TIMEOUT_S = 1800.0
"""How long ranks wait for each other while models load; a rank that dies meanwhile is noticed by its supervisor."""
LOOPBACK = "lo"
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1", "[::1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank belongs.

    ``store``: a file that all ranks see, or ``host:port`` at which rank 0 listens. ``inbox``: the address at which
    this rank hears from its peers. ``timeout_s``: how long a rank waits in a collective for the slowest.
    """

    size: int
    rank: int
    store: str
    inbox: str
    timeout_s: float

    def __post_init__(self) -> None:
        require_int(self.size, 1, "data_parallel.size")
        require_int(self.rank, 0, "data_parallel.rank")
        require(self.rank < self.size, "data_parallel.rank", f"must be below {self.size}, got {self.rank}")
        require_seconds(self.timeout_s, "distributed_timeout_seconds")


class Meeting:
    """The ranks of a group, from their meeting on; torch.distributed's default group is theirs."""

    def __init__(self, place: Place) -> None:
        """Meet the others.

        Raises:
            ConfigError: the address cannot be reached, or listened at; the rank has come before.
            PeerLost: the others did not come.
        """
        self.place = place
        self._store = _store(place)
        if self._store.add(f"came/{place.rank}", 1) != 1:
            raise ConfigError("data_parallel_rank", f"rank {place.rank} came twice; each rank is run once")
        if place.store.startswith("/") or place.store.rpartition(":")[0] in LOOPBACK_HOSTS:
            # All ranks share this host: collectives need no network, nor a host name that resolves.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        try:
            dist.init_process_group(
                "gloo",
                store=PrefixStore("group", self._store),
                rank=place.rank,
                world_size=place.size,
                timeout=timedelta(seconds=place.timeout_s),
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
        mine = json.loads(json.dumps(facts))
        place = self.place
        try:
            self._store.set(f"facts/{place.rank}", json.dumps({"facts": mine, "inbox": place.inbox}))
            told = [json.loads(self._store.get(f"facts/{rank}")) for rank in range(place.size)]
        except RuntimeError as error:
            raise PeerLost(f"a rank did not join: {first_line(error)}") from error
        for rank, other in enumerate(told):
            for name, ours, theirs in differences(told[0]["facts"], other["facts"]):
                raise ConfigError(
                    "data_parallel", f"ranks 0 and {rank} differ in {name}: {ours!r} and {theirs!r}; they must be equal"
                )
        return [other["inbox"] for rank, other in enumerate(told) if rank != place.rank]


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
                timeout=timedelta(seconds=JOIN_TIMEOUT_S),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            raise ConfigError("data_parallel_rpc_port", f"no meeting at {place.store}: {first_line(error)}") from None
    store.set_timeout(timedelta(seconds=JOIN_TIMEOUT_S))
    return store
