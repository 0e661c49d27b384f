# SPDX-License-Identifier: Apache-2.0
"""The data-parallel flags of ``paceline serve``: which ranks run here, and where they meet the others.

    --data-parallel-size N                           all ranks here, one server
    ... --data-parallel-size-local L                 L ranks here, one server for all: the others are run with
    ... --headless                                   no server, and served by the one that runs rank 0, which gives out
                                                     ranks in the order in which such nodes come, or
    ... --headless --data-parallel-start-rank S      ranks from S on
    ... --data-parallel-hybrid-lb                    a server for the L ranks here; others have servers of their own
    ... --data-parallel-rank R                       the same for one rank, fed by a balancer outside
    --data-parallel-size N --data-parallel-backend ray   one server, ranks where Ray places them

Ranks that share experts meet at --data-parallel-address, port --data-parallel-rpc-port; a server with headless ranks
listens to them at the next port.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.cli.output import CommandError, at_least

DEFAULT_TIMEOUT_S = 600.0
"""How long a rank waits for the slowest in a collective: longer than any step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelFlags:
    """As given; None: not given."""

    size: int | None = None
    size_local: int | None = None
    start_rank: int | None = None
    rank: int | None = None
    address: str | None = None
    rpc_port: int | None = None
    headless: bool = False
    hybrid_lb: bool = False
    backend: str = "mp"
    enable_expert_parallel: bool = False
    timeout_s: float | None = None

    def with_environment(self, environment: Mapping[str, str]) -> DataParallelFlags:
        """What launchers say in RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, where no flag says otherwise.

        Raises:
            CommandError: a variable is not a number.
        """
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            return self
        numbers = {}
        for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
            if name in environment:
                if not environment[name].isdigit():
                    raise CommandError(f"{name}: must be a number, got {environment[name]!r} in the environment")
                numbers[name] = int(environment[name])
        if numbers["WORLD_SIZE"] == 1 or self.size is not None:
            return self
        chosen = replace(self, size=numbers["WORLD_SIZE"], rank=numbers["RANK"] if self.rank is None else self.rank)
        if not self.enable_expert_parallel:
            return chosen
        return replace(
            chosen,
            address=self.address or environment.get("MASTER_ADDR"),
            rpc_port=numbers.get("MASTER_PORT") if self.rpc_port is None else self.rpc_port,
        )

    def placement(self) -> tuple[int, dict[str, Any]]:
        """How many ranks this server runs, and what they need to know (see `runtime.engine_group`).

        Raises:
            CommandError: flags that contradict each other, or that are not supported.
        """
        size = 1 if self.size is None else self.size
        at_least(size, 1, "--data-parallel-size")
        self._check_backend(size)
        options: dict[str, Any] = {
            "enable_expert_parallel": self.enable_expert_parallel,
            "timeout_s": self._timeout(size),
        }
        local, first = self._own_ranks(size)
        options |= {"size": size, "first": first}
        one_front = self.rank is None and not self.hybrid_lb
        if local == size or not (one_front or self.enable_expert_parallel):
            for flag, value in (("address", self.address), ("rpc-port", self.rpc_port)):
                if value is not None:
                    raise CommandError(
                        f"--data-parallel-{flag}: these ranks meet nobody: they share no experts with others, or all"
                        " run here; leave it out"
                    )
            return local, options
        host, port = self._meeting_place(local, size)
        if self.enable_expert_parallel:
            options["store"] = f"{host}:{port}"
        if one_front:
            options["front"] = f"{host}:{port + 1}"
        return local, options

    def _meeting_place(self, local: int, size: int) -> tuple[str, int]:
        if self.address is None or self.rpc_port is None:
            raise CommandError(
                f"--data-parallel-address, --data-parallel-rpc-port: needed, since only {local} of {size} ranks run"
                " here; where rank 0 runs, the same everywhere"
            )
        if not 0 < self.rpc_port < 65535:
            raise CommandError(
                f"--data-parallel-rpc-port: must be from 1 to 65534, got {self.rpc_port}; the next one is used as well"
            )
        return f"[{self.address}]" if ":" in self.address else self.address, self.rpc_port

    def _check_backend(self, size: int) -> None:
        if self.backend not in ("mp", "ray"):
            raise CommandError(f"--data-parallel-backend: must be mp or ray, got {self.backend}")
        if self.backend == "mp":
            return
        if size == 1:
            raise CommandError("--data-parallel-backend: ray places several ranks (--data-parallel-size)")
        given = {
            "--data-parallel-size-local": self.size_local,
            "--data-parallel-start-rank": self.start_rank,
            "--data-parallel-rank": self.rank,
            "--data-parallel-address": self.address,
            "--data-parallel-rpc-port": self.rpc_port,
            "--data-parallel-hybrid-lb": self.hybrid_lb or None,
            "--headless": self.headless or None,
        }
        for flag, value in given.items():
            if value is not None:
                raise CommandError(f"{flag}: Ray decides where ranks run (--data-parallel-backend ray); leave it out")

    def _timeout(self, size: int) -> float:
        if self.timeout_s is None:
            return DEFAULT_TIMEOUT_S
        if not 0 < self.timeout_s < float("inf"):
            raise CommandError(f"--distributed-timeout-seconds: must be above 0, got {self.timeout_s:g}")
        if size == 1 or not self.enable_expert_parallel:
            raise CommandError("--distributed-timeout-seconds: ranks that share no experts wait for nobody; omit it")
        return self.timeout_s

    def _own_ranks(self, size: int) -> tuple[int, int | None]:
        """How many ranks run here, and which is the first (None: the server of rank 0 will say)."""
        if self.rank is not None:
            for flag, given in (("size-local", self.size_local), ("start-rank", self.start_rank)):
                if given is not None:
                    raise CommandError(f"--data-parallel-{flag}: --data-parallel-rank says which rank runs here")
            if self.headless:
                raise CommandError("--headless: --data-parallel-rank is for servers; give --data-parallel-start-rank")
            if self.hybrid_lb:
                raise CommandError("--data-parallel-hybrid-lb: a server of one rank (--data-parallel-rank) has none")
            _within("--data-parallel-rank", self.rank, size)
            return 1, self.rank
        if self.headless:
            return self._headless_ranks(size)
        local = size if self.size_local is None else self.size_local
        at_least(local, 1, "--data-parallel-size-local")
        if local > size:
            raise CommandError(f"--data-parallel-size-local: at most --data-parallel-size = {size}, got {local}")
        if local == size:
            if self.start_rank:
                raise CommandError(f"--data-parallel-start-rank: all {size} ranks run here, so the first is 0")
            if self.hybrid_lb:
                raise CommandError("--data-parallel-hybrid-lb: needs --data-parallel-size-local below the size")
            return local, 0
        first = 0 if self.start_rank is None else self.start_rank
        if first and not self.hybrid_lb:
            raise CommandError(
                "--data-parallel-start-rank: ranks behind the first have a server of their own (add"
                " --data-parallel-hybrid-lb) or are served by that of rank 0 (add --headless)"
            )
        _within("--data-parallel-start-rank", first, size - local + 1)
        return local, first

    def _headless_ranks(self, size: int) -> tuple[int, int | None]:
        if self.hybrid_lb:
            raise CommandError("--data-parallel-hybrid-lb: ranks without a server (--headless) share out nothing")
        if self.start_rank is None:
            if self.size_local is None:
                raise CommandError(
                    "--data-parallel-size-local: needed with --headless where no --data-parallel-start-rank says which"
                    " ranks run here"
                )
            if not 1 <= self.size_local < size:
                raise CommandError(
                    f"--data-parallel-size-local: must be from 1 to {size - 1} with --headless (the server runs rank"
                    f" 0), got {self.size_local}"
                )
            return self.size_local, None
        if not 1 <= self.start_rank < size:
            raise CommandError(
                f"--data-parallel-start-rank: must be from 1 to {size - 1} with --headless, got {self.start_rank}"
            )
        local = size - self.start_rank if self.size_local is None else self.size_local
        if not 1 <= local <= size - self.start_rank:
            raise CommandError(
                f"--data-parallel-size-local: must be from 1 to {size - self.start_rank} behind rank"
                f" {self.start_rank - 1}, got {local}"
            )
        return local, self.start_rank


def _within(flag: str, value: int, end: int) -> None:
    if not 0 <= value < end:
        raise CommandError(f"{flag}: must be from 0 to {end - 1}, got {value}")
