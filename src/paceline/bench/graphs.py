# SPDX-License-Identifier: Apache-2.0
"""What decode graphs save: decode steps by the static backend against the same ones by the general path.

Each number of tokens is measured twice: on one rank that holds its share of the experts, with the exchange left out of
the time, and on as many ranks as asked for, with the exchange in it. Steps of both kinds take turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from paceline.core.config import require, require_int
from paceline.core.results import Latency

if TYPE_CHECKING:
    from paceline.bench.serve import Stage

RANK_PROGRAM = (sys.executable, "-m", "paceline.runtime.step_times")
"""A rank that measures; it needs torch, so it is a program of its own (see there what it reads and writes)."""
WARM_UPS = 6
"""Steps of each kind before the measured ones."""
END_TIMEOUT_S = 10.0
"""How long ranks may take to end once the first has."""


class MeasurementFailed(RuntimeError):
    """A rank could not measure; the message is what it said last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """``model``: a folder with a mixture of experts. ``sizes``: tokens of a step, in rows of W = 1 + K each.

    ``context``: tokens before each row. ``steps``: measured of each kind.
    """

    model: Path
    ranks: int = 2
    sizes: tuple[int, ...] = (4, 8, 16, 32, 64)
    num_speculative_tokens: int = 3
    context: int = 100
    steps: int = 60

    def __post_init__(self) -> None:
        require_int(self.ranks, 1, "ranks")
        require_int(self.num_speculative_tokens, 0, "num_speculative_tokens")
        for name in ("context", "steps"):
            require_int(getattr(self, name), 1, name)
        require(len(self.sizes) > 0, "sizes", "name at least one")
        for size in self.sizes:
            require_int(size, 1, "sizes")
            require(
                size % self.width == 0,
                "sizes",
                f"rows have 1 + num_speculative_tokens = {self.width} tokens; {size} is no multiple of that",
            )

    @property
    def width(self) -> int:
        """W, tokens of a row."""
        return 1 + self.num_speculative_tokens


def run(options: GraphOptions, environment: Mapping[str, str], stage: Stage) -> dict[str, Any]:
    """Measure; ``environment`` is that of each rank's process, and says how many threads it has.

    Returns:
        ``rows``: milliseconds per step, without logits, sampling and drafts. ``exchange`` excluded: one rank with 1 /
        ``ranks`` of the experts, to which ``ranks`` times its own tokens arrive; included: all ranks, and the time is
        that of rank 0, its waits for the others among it.

    Raises:
        MeasurementFailed: the model has no static backend, or a rank failed.
    """
    with stage("one rank, exchange excluded") as progress:
        rows = _rows("excluded", _measure(options, 1, environment, progress))
    if options.ranks > 1:
        with stage(f"{options.ranks} ranks, exchange included") as progress:
            rows += _rows("included", _measure(options, options.ranks, environment, progress))
    return {"rows": rows, **asdict(options), "model": str(options.model)}


def _rows(exchange: str, measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for times in measured:
        general, static = (Latency.of(times[kind], (90.0,)) for kind in ("general_s", "static_s"))
        rows.append(
            {
                "exchange": exchange,
                "tokens": times["tokens"],
                "general_ms": general.median_ms,
                "general_p90_ms": general.p(90.0),
                "static_ms": static.median_ms,
                "static_p90_ms": static.p(90.0),
                "ratio": general.median_ms / static.median_ms,
            }
        )
    return rows


def _measure(
    options: GraphOptions, processes: int, environment: Mapping[str, str], progress: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """What rank 0 measured, size by size."""
    measured: list[dict[str, Any]] = []
    total = len(options.sizes) * (WARM_UPS + options.steps)
    with tempfile.TemporaryDirectory(prefix="paceline-graphs-") as folder, (Path(folder) / "log").open("w+") as log:
        spec = {
            "model": str(options.model.resolve()),
            "sizes": sorted(options.sizes),
            "width": options.width,
            "context": options.context,
            "warm_ups": WARM_UPS,
            "steps": options.steps,
            "ranks": options.ranks,
            "store": str(Path(folder) / "store") if processes > 1 else None,
        }
        with _processes([{**spec, "rank": rank} for rank in range(processes)], environment, log) as ranks:
            assert ranks[0].stdout is not None
            for line in ranks[0].stdout:
                told = json.loads(line)
                if "done" in told:
                    progress(told["done"], total)
                else:
                    measured.append(told)
            for rank in ranks:
                with suppress(subprocess.TimeoutExpired):
                    rank.wait(END_TIMEOUT_S)
        if any(rank.returncode for rank in ranks) or len(measured) != len(options.sizes):
            log.seek(0)
            raise MeasurementFailed((log.read().strip().splitlines() or ["a rank ended without a word"])[-1])
    return measured


@contextmanager
def _processes(
    specs: Sequence[Mapping[str, Any]], environment: Mapping[str, str], log: IO[str]
) -> Iterator[list[subprocess.Popen[str]]]:
    """Ranks, for the duration of the block; one that fails takes the others along, which would wait for it."""
    ranks: list[subprocess.Popen[str]] = []

    def kill_all() -> None:
        for rank in ranks:
            rank.kill()

    def watch(rank: subprocess.Popen[str]) -> None:
        if rank.wait():
            kill_all()

    try:
        for spec in specs:
            pipe = subprocess.PIPE
            rank = subprocess.Popen(
                RANK_PROGRAM,
                stdin=pipe,
                stdout=pipe if not ranks else subprocess.DEVNULL,
                stderr=log,
                env=dict(environment),
                text=True,
            )
            ranks.append(rank)
            assert rank.stdin is not None
            # One that died at once is noticed below.
            with suppress(BrokenPipeError), rank.stdin as told:
                told.write(json.dumps(spec))
        for rank in ranks:
            threading.Thread(target=watch, args=(rank,), daemon=True).start()
        yield ranks
    finally:
        kill_all()
        for rank in ranks:
            rank.wait()
            if rank.stdout is not None:
                rank.stdout.close()
