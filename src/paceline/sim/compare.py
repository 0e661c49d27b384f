# SPDX-License-Identifier: Apache-2.0
"""Variants of one scenario side by side, over a sweep and several seeds, and against what was observed."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from paceline.core.config import ConfigError, require
from paceline.sim.fields import parse_value, set_path
from paceline.sim.scenario import MEASURES, Scenario, scenario_from

if TYPE_CHECKING:
    from paceline.sim.cluster import RunReport

T = TypeVar("T")
Simulate = Callable[[Scenario, int], "RunReport"]
"""Runs a scenario once; the number picks the seed."""


class Setting(NamedTuple):
    """One value of a varied or swept key: ``text`` as the user wrote it names it in tables."""

    text: str
    value: object


class Point(NamedTuple):
    """A cell before it is run: one variant at one value of the swept key, and the scenario that they give."""

    at: Setting | None
    variant: Setting
    scenario: Scenario


@dataclass(frozen=True, slots=True)
class Run:
    """One simulated run of a cell."""

    index: int
    report: RunReport


@dataclass(frozen=True, slots=True)
class Cell:
    """All runs of one variant at one value of the swept key. A figure of a cell is the median over its runs."""

    at: Setting | None
    variant: Setting
    observed: Mapping[str, float]
    runs: tuple[Run, ...]

    def values(self, measure: str) -> list[float]:
        """``measure`` of each run, in the order of the seeds."""
        return [float(getattr(run.report, measure)) for run in self.runs]

    def median(self, measure: str) -> float:
        return statistics.median(self.values(measure))

    def abs_log_error(self, measure: str) -> float | None:
        """|ln(simulated / observed)|; None where nothing was observed."""
        seen = self.observed.get(measure)
        return None if seen is None else abs_log_ratio(self.median(measure), seen)

    def misses(self) -> dict[str, float]:
        """Median count of each reason for a step without the verifier's uniform width."""
        reasons = sorted({reason for run in self.runs for reason in run.report.misses})
        return {r: statistics.median(run.report.misses.get(r, 0) for run in self.runs) for r in reasons}

    def to_json(self, sweep: str | None) -> dict[str, Any]:
        """Medians; ``completed`` and ``failed`` are those of the worst run, so that no failure hides."""
        return {
            **({sweep: self.at.value} if sweep and self.at else {}),
            "variant": self.variant.text,
            **{name: self.median(name) for name in MEASURES},
            "completed": min(run.report.completed for run in self.runs),
            "failed": max(run.report.failed for run in self.runs),
            "acceptance_length": self.median("acceptance_length"),
            "full_step_share": self.median("full_step_share"),
            "misses": self.misses(),
            "seeds": [run.report.seed for run in self.runs],
        }


@dataclass(frozen=True, slots=True)
class Branches:
    """How the runs of a bistable cell divide: those below and those above ``split_ms``.

    ``split_ms`` is the geometric mean of the two values on either side of the widest gap, in ratio, between
    neighbouring values. ``low_ms`` and ``high_ms`` are the medians of the two sides; ``observed_high`` says on which
    side of the split the observed value lies.
    """

    measure: str
    split_ms: float
    low_ms: float
    high_ms: float
    low: int
    high: int
    observed_ms: float | None

    @property
    def observed_high(self) -> bool | None:
        return None if self.observed_ms is None else self.observed_ms > self.split_ms

    @property
    def share_like_observed(self) -> float | None:
        """Share of runs on the observed value's side."""
        if self.observed_high is None:
            return None
        return (self.high if self.observed_high else self.low) / (self.low + self.high)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome of `compare`: cells in the order of the variants within each swept value."""

    scenario: Scenario
    vary: str
    sweep: str | None
    cells: tuple[Cell, ...]
    wall_s: float

    @property
    def mean_abs_log_error(self) -> float | None:
        """Mean of |ln(simulated / observed)| over every observed measure of every cell; None if there is none."""
        errors = [e for cell in self.cells for m in MEASURES if (e := cell.abs_log_error(m)) is not None]
        return statistics.fmean(errors) if errors else None

    @property
    def busy_rank_steps(self) -> int:
        """Rank-steps with at least one row, over all runs."""
        return sum(run.report.busy_rank_steps for cell in self.cells for run in cell.runs)

    def to_json(self) -> dict[str, Any]:
        observed = [
            {**({self.sweep: c.at.value} if self.sweep and c.at else {}), "variant": c.variant.text, **c.observed}
            for c in self.cells
            if c.observed
        ]
        return {
            "scenario": self.scenario.name,
            "cells": [cell.to_json(self.sweep) for cell in self.cells],
            "observed": observed or None,
            "mean_abs_log_error": self.mean_abs_log_error,
            "wall_s": self.wall_s,
            "busy_rank_steps": self.busy_rank_steps,
        }

    def runs_json(self) -> list[dict[str, Any]]:
        """Every run by itself, for a results file."""
        return [
            {
                **({self.sweep: cell.at.value} if self.sweep and cell.at else {}),
                "variant": cell.variant.text,
                "run": run.index,
                "seed": run.report.seed,
                **{name: getattr(run.report, name) for name in MEASURES},
                "completed": run.report.completed,
                "failed": run.report.failed,
                "acceptance_length": run.report.acceptance_length,
                "full_step_share": run.report.full_step_share,
                "misses": dict(run.report.misses),
                "trace_hash": run.report.trace_hash,
            }
            for cell in self.cells
            for run in cell.runs
        ]


def abs_log_ratio(simulated: float, observed: float) -> float:
    """|ln(simulated / observed)|; infinite if nothing was simulated."""
    return abs(math.log(simulated / observed)) if simulated > 0 else math.inf


def split_branches(cell: Cell, measure: str, least_ratio: float = 1.5) -> Branches | None:
    """The two branches of ``measure``, or None if no gap between neighbouring values is ``least_ratio`` wide."""
    values = sorted(cell.values(measure))
    gaps = [(b / a if a > 0 else math.inf, i) for i, (a, b) in enumerate(itertools.pairwise(values))]
    ratio, i = max(gaps, default=(1.0, 0))
    if ratio < least_ratio:
        return None
    low, high = values[: i + 1], values[i + 1 :]
    return Branches(
        measure=measure,
        split_ms=math.sqrt(values[i] * values[i + 1]),
        low_ms=statistics.median(low),
        high_ms=statistics.median(high),
        low=len(low),
        high=len(high),
        observed_ms=cell.observed.get(measure),
    )


def parse_settings(argument: str, option: str) -> tuple[str, tuple[Setting, ...]]:
    """``KEY=v1,v2`` as the key and its values, each read as YAML. Commas inside brackets do not separate."""
    key, equals, text = argument.partition("=")
    require(bool(key and equals and text), option, f"must look like KEY=value,value, got {argument!r}")
    parts, depth = [""], 0
    for char in text:
        depth += (char in "[{") - (char in "]}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    texts = [part.strip() for part in parts]
    require(all(texts), option, f"has an empty value in {argument!r}")
    require(len(set(texts)) == len(texts), option, f"names a value twice in {argument!r}")
    return key.strip(), tuple(Setting(t, parse_value(t)) for t in texts)


def points(
    raw: Mapping[str, Any],
    vary: tuple[str, Sequence[Setting]],
    sweep: tuple[str, Sequence[Setting]] | None = None,
) -> list[Point]:
    """Every cell of a comparison, the variants within each swept value. Raises `ConfigError` for one that cannot be."""
    require(sweep is None or sweep[0] != vary[0], "--sweep", "must be another key than --vary")
    found: list[Point] = []
    for at in sweep[1] if sweep else (None,):
        swept = set_path(raw, sweep[0], at.value) if sweep and at else raw
        found += [Point(at, v, scenario_from(set_path(swept, vary[0], v.value))) for v in vary[1]]
    return found


def compare(
    raw: Mapping[str, Any],
    vary: tuple[str, Sequence[Setting]],
    sweep: tuple[str, Sequence[Setting]] | None = None,
    *,
    seeds: int = 1,
    jobs: int = 1,
    simulate: Simulate | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Simulate every (swept value, variant, run) of a scenario given as plain data, ``jobs`` at a time.

    All cells and their seeds are validated before any is run. The order of the results does not depend on ``jobs``.
    ``progress`` is told how many runs of how many are done. Raises `ConfigError` for a field that cannot be.
    """
    require(seeds >= 1, "--seeds", f"must be at least 1, got {seeds}")
    require(jobs >= 1, "--jobs", f"must be at least 1, got {jobs}")
    base = scenario_from(raw)
    cells_to_run = points(raw, vary, sweep)
    for point in cells_to_run:
        point.scenario.seed(seeds - 1)
    started = time.perf_counter()
    tasks = [(point.scenario, run) for point in cells_to_run for run in range(seeds)]
    reports = _run_all(tasks, jobs, simulate or _simulate, progress)
    cells = []
    for number, (at, variant, scenario) in enumerate(cells_to_run):
        mine = reports[number * seeds : (number + 1) * seeds]
        seen = _observed(base, vary[0], variant, sweep[0] if sweep else None, scenario)
        cells.append(Cell(at, variant, seen, tuple(Run(i, report) for i, report in enumerate(mine))))
    return Comparison(base, vary[0], sweep[0] if sweep else None, tuple(cells), time.perf_counter() - started)


def _simulate(scenario: Scenario, run: int) -> RunReport:
    from paceline.sim.cluster import simulate

    return simulate(scenario, run)


def _run_all(
    tasks: Sequence[tuple[Scenario, int]], jobs: int, simulate: Simulate, progress: Callable[[int, int], None]
) -> list[RunReport]:
    """Reports in the order of ``tasks``."""
    total = len(tasks)
    progress(0, total)
    if min(jobs, total) == 1:
        return list(_counted((simulate(*task) for task in tasks), total, progress))
    # Fresh interpreters: forking a process that already runs a progress bar's thread can deadlock.
    context = multiprocessing.get_context("spawn")
    # Interrupts are for the parent, which stops handing out runs.
    with ProcessPoolExecutor(min(jobs, total), context, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        futures: list[Future[RunReport]] = [pool.submit(simulate, *task) for task in tasks]
        try:
            for done in _counted(as_completed(futures), total, progress):
                done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def _counted(items: Iterator[T], total: int, progress: Callable[[int, int], None]) -> Iterator[T]:
    """``items``, reporting each as it is reached."""
    for count, item in enumerate(items, 1):
        progress(count, total)
        yield item


def _observed(base: Scenario, vary: str, variant: Setting, sweep: str | None, cell: Scenario) -> dict[str, float]:
    """Measurements of the cell, if the scenario's observations are about these keys."""
    seen = base.observed
    if seen is None or seen.vary != vary or (sweep is not None and sweep != seen.sweep):
        return {}
    at = lookup(cell, seen.sweep)
    for c in seen.cells:
        if c.variant == variant.text and c.at == at:
            return {m: value for m in MEASURES if (value := getattr(c, m)) is not None}
    return {}


def lookup(scenario: Scenario, key: str) -> object:
    """The value at a dotted key. Raises `ConfigError` if there is none."""
    value: object = scenario
    for part in key.split("."):
        if not hasattr(value, part):
            raise ConfigError(key, "is not a field of the scenario")
        value = getattr(value, part)
    return value
