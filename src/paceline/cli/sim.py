# SPDX-License-Identifier: Apache-2.0
"""``paceline sim``: one run, a comparison of variants, and the scenarios themselves."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from rich.table import Table
from rich.text import Text

from paceline.cli.output import (
    STDOUT,
    CommandError,
    Json,
    at_least,
    check_folder,
    check_target,
    integer,
    progress_bar,
    stderr,
    stdout,
    write_json,
)
from paceline.sim.fields import parse_value, set_path, write_yaml
from paceline.sim.scenario import Scenario, load_raw, scenario_from, shipped, to_plain, with_seed

if TYPE_CHECKING:
    from paceline.sim.cluster import RunReport
    from paceline.sim.compare import Point

EXAMPLES = """Examples:

  paceline sim list
  paceline sim run kimi_k3_dep16
  paceline sim compare kimi_k3_dep16 \\
      --vary speculation.pad_resumed=running,resumed"""

RUN_EXAMPLES = """Examples:

  paceline sim run kimi_k3_dep16
  paceline sim run kimi_k3_dep16 --set workload.request_rate=2 \\
      --set speculation.pad_resumed=running
  paceline sim run my_cluster.yaml --seed 7 --out out

KEY is a dotted field of `paceline sim show SCENARIO`.
VALUE is read as YAML: 12, true, null, [1, 2]."""

COMPARE_EXAMPLES = """Examples:

  The padding rule before and after, at five loads, beside the real cluster:
    paceline sim compare kimi_k3_dep16 --sweep workload.request_rate=2,3,4,5,6 \\
        --vary speculation.pad_resumed=running,resumed --seeds 5 --out out

  How often a cell with two branches falls on which, over 20 seeds:
    paceline sim compare kimi_k3_dep16 --sweep workload.request_rate=5 \\
        --vary speculation.pad_resumed=running --seeds 20 --branches"""

SHOW_EXAMPLES = """Examples:

  paceline sim show kimi_k3_dep16 > my_cluster.yaml
  paceline sim show kimi_k3_dep16 --set cluster.nodes=8"""

app = App(name="sim", help_epilogue=EXAMPLES)

ScenarioName = Annotated[str, Parameter(help="A shipped scenario (see `paceline sim list`) or a YAML file.")]
Sets = Annotated[
    tuple[str, ...],
    Parameter(name="--set", negative=(), show_default=False, help="KEY=VALUE: set a field of it. May be repeated."),
]


@app.command(name="list", help_epilogue="")
def list_scenarios() -> None:
    """List the scenarios that come with paceline."""
    table = Table("name", "what it is")
    for name, description in shipped().items():
        table.add_row(name, description)
    stdout().print(table)


@app.command(help_epilogue=SHOW_EXAMPLES)
def show(scenario: ScenarioName, /, *, sets: Sets = ()) -> None:
    """Print a scenario as YAML, with every default filled in. The output is itself a scenario file."""
    plain = to_plain(scenario_from(apply_sets(load_raw(scenario), sets)))
    print(write_yaml(plain), end="")


@app.command(help_epilogue=RUN_EXAMPLES)
def run(
    scenario: ScenarioName,
    /,
    *,
    sets: Sets = (),
    seed: Annotated[
        int | None,
        Parameter(
            converter=integer, help="Workload seed of the run. Default: what the scenario's `seeds` give for run 0."
        ),
    ] = None,
    out: Annotated[
        Path | None, Parameter(help="Folder for results.json and scenario.yaml, which repeats the run exactly.")
    ] = None,
    json: Json = None,
) -> None:
    """Simulate a scenario once: latencies, and why steps missed the decode graph."""
    from paceline.sim.cluster import SimulationStuck, simulate
    from paceline.sim.report import run_table

    raw = apply_sets(load_raw(scenario), sets)
    built = scenario_from(raw if seed is None else with_seed(raw, seed))
    warn({"": built})
    check_folder(out, ("results.json", "scenario.yaml"), "--out")
    check_target(json, "--json")
    try:
        with progress_bar(f"simulating {built.name}"):
            report = simulate(built, 0)
    except SimulationStuck as error:
        raise CommandError(str(error)) from error
    warn_of_prefill([report])
    result: dict[str, Any] = {"scenario": built.name, **dataclasses.asdict(report)}
    if out is not None:
        write_json(result, str(out / "results.json"))
        (out / "scenario.yaml").write_text(write_yaml(to_plain(built)), encoding="utf-8")
        stderr().print(f"wrote {out}/results.json, {out}/scenario.yaml", soft_wrap=True)
    if json is not None:
        write_json(result, json)
    if json != STDOUT:
        stdout().print(run_table(built.name, report))


@app.command(help_epilogue=COMPARE_EXAMPLES)
def compare(
    scenario: ScenarioName,
    /,
    *,
    vary: Annotated[str, Parameter(help="KEY=A,B: the field to compare, and its values.")],
    sweep: Annotated[str | None, Parameter(help="KEY=v1,v2,...: repeat the comparison at each value.")] = None,
    sets: Sets = (),
    seeds: Annotated[
        int, Parameter(converter=integer, help="Runs of each cell; a cell's figures are the medians over them.")
    ] = 1,
    jobs: Annotated[
        int | None, Parameter(converter=integer, help="Processes at a time. Default: the cores that may be used.")
    ] = None,
    branches: Annotated[
        bool, Parameter(negative=(), help="Also list each cell's P99 by seed, and how it divides into branches.")
    ] = False,
    out: Annotated[Path | None, Parameter(help="Folder for results.json (every run) and itl.svg (the curves).")] = None,
    json: Json = None,
) -> None:
    """Simulate variants of a scenario side by side, and beside what was observed on a real cluster."""
    from paceline.sim.cluster import SimulationStuck
    from paceline.sim.compare import compare as simulate_all
    from paceline.sim.compare import parse_settings, points
    from paceline.sim.report import branches_json, branches_table, comparison_table, runs_table, save_comparison

    raw = apply_sets(load_raw(scenario), sets)
    varied = parse_settings(vary, "--vary")
    swept = None if sweep is None else parse_settings(sweep, "--sweep")
    base = scenario_from(raw)
    cores = at_least(usable_cores() if jobs is None else jobs, 1, "--jobs")
    at_least(seeds, 1, "--seeds")
    warn({_where(point, varied[0], swept and swept[0]): point.scenario for point in points(raw, varied, swept)})
    check_folder(out, ("results.json", "itl.svg"), "--out")
    check_target(json, "--json")
    if sets and base.observed is not None:
        stderr().print("note: the observed values belong to the scenario without --set", soft_wrap=True)
    try:
        with progress_bar("simulating") as progress:
            comparison = simulate_all(raw, varied, swept, seeds=seeds, jobs=cores, progress=progress)
    except SimulationStuck as error:
        raise CommandError(str(error)) from error
    warn_of_prefill([run.report for cell in comparison.cells for run in cell.runs])
    if out is not None:
        written = save_comparison(comparison, out)
        stderr().print(f"wrote {', '.join(map(str, written))}", soft_wrap=True)
    if json is not None:
        extra = {"branches": branches_json(comparison)} if branches else {}
        write_json({**comparison.to_json(), **extra}, json)
    if json != STDOUT:
        console = stdout()
        console.print(comparison_table(comparison))
        console.print(runs_table(comparison))
        if branches:
            console.print(branches_table(comparison))


def apply_sets(raw: dict[str, Any], sets: tuple[str, ...]) -> dict[str, Any]:
    """Scenario data with each ``KEY=VALUE`` applied in order."""
    for text in sets:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise CommandError(f"--set: must look like KEY=VALUE, got {text!r}")
        raw = set_path(raw, key.strip(), parse_value(value))
    return raw


def _where(point: Point, vary: str, sweep: str | None) -> str:
    """A cell by its settings."""
    at = f"{sweep}={point.at.text}, " if sweep and point.at else ""
    return f"{at}{vary}={point.variant.text}"


def warn(scenarios: Mapping[str, Scenario]) -> None:
    """Print what is legal but probably not meant: each warning once, with the names of the scenarios it is about."""
    about: dict[str, list[str]] = {}
    for name, scenario in scenarios.items():
        for warning in scenario.engine.warnings():
            about.setdefault(warning, []).append(name)
    for warning, names in about.items():
        where = f" (at {'; '.join(names)})" if len(names) < len(scenarios) else ""
        _print_warning(warning + where)


def warn_of_prefill(reports: Sequence[RunReport]) -> None:
    """Print that steps which computed prompts were charged too little, if there were any."""
    from paceline.core.passes import MISS_PREFILL

    if any(report.misses.get(MISS_PREFILL) for report in reports):
        _print_warning(
            "steps computed prompt tokens, and cost.model linear charges rows only: their times are too short."
            " It is meant for decode clusters, with connector.name: DecodeBenchConnector"
        )


def _print_warning(text: str) -> None:
    stderr().print(Text(f"warning: {text}"), soft_wrap=True)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))
