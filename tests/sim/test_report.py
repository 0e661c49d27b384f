# SPDX-License-Identifier: Apache-2.0
"""Comparisons: which runs are made, how cells are formed, and what tables, JSON and charts say about them.

The simulator itself is replaced by a formula: it is the seam below everything tested here.
"""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from paceline.core.config import ConfigError
from paceline.sim import report
from paceline.sim.cluster import RunReport
from paceline.sim.compare import Comparison, Simulate, compare, lookup, parse_settings, points, split_branches
from paceline.sim.fields import set_path
from paceline.sim.scenario import Scenario, load, load_raw

KIMI = "kimi_k3_dep16"
PAD = parse_settings("speculation.pad_resumed=running,resumed", "--vary")
RATES = parse_settings("workload.request_rate=2,5", "--sweep")


def formula(scenario: Scenario, run: int) -> RunReport:
    """P50 is 30 + run; P99 is 60, but 240 for odd runs of `running` at rate 5."""
    slow = scenario.speculation.pad_resumed == "running" and scenario.workload.request_rate == 5 and run % 2 == 1
    return make_report(scenario.seed(run), 30.0 + run, 240.0 if slow else 60.0, completed=480 - (run == 1))


def make_report(seed: int, p50: float, p99: float, completed: int = 480) -> RunReport:
    return RunReport(
        p50_itl_ms=p50,
        p99_itl_ms=p99,
        p50_ttft_ms=50.0,
        p99_ttft_ms=90.0,
        completed=completed,
        failed=480 - completed,
        acceptance_length=2.5,
        full_step_share=0.9,
        misses={"qlen_1_resumed": seed % 7},
        group_steps=900,
        busy_rank_steps=1000,
        idle_rank_admissions=3,
        trace_hash=f"{seed:x}",
        sim_duration_s=100.0,
        seed=seed,
    )


def run_kimi(seeds: int = 3, simulate: Simulate = formula, **options: Any) -> Comparison:
    return compare(load_raw(KIMI), PAD, RATES, seeds=seeds, simulate=simulate, **options)


def text_of(table: Table) -> str:
    console = Console(width=160, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_every_cell_runs_with_every_seed_in_order() -> None:
    done: list[tuple[int, int]] = []
    got = run_kimi(progress=lambda n, total: done.append((n, total)))
    shape = [(c.at and c.at.value, c.variant.text, [r.report.seed for r in c.runs]) for c in got.cells]
    assert shape == [
        (2, "running", [302, 1302, 2302]),
        (2, "resumed", [302, 1302, 2302]),
        (5, "running", [305, 1305, 2305]),
        (5, "resumed", [305, 1305, 2305]),
    ]
    assert done == [(n, 12) for n in range(13)]


def test_json_has_the_cells_and_the_error() -> None:
    got = json.loads(json.dumps(run_kimi().to_json(), allow_nan=False))
    assert set(got) == {"scenario", "cells", "observed", "mean_abs_log_error", "wall_s", "busy_rank_steps"}
    assert got["scenario"] == KIMI
    assert got["busy_rank_steps"] == 12 * 1000
    first = got["cells"][0]
    assert first == {
        "workload.request_rate": 2,
        "variant": "running",
        "p50_itl_ms": 31.0,
        "p99_itl_ms": 60.0,
        "p50_ttft_ms": 50.0,
        "p99_ttft_ms": 90.0,
        "completed": 479,
        "failed": 1,
        "acceptance_length": 2.5,
        "full_step_share": 0.9,
        "misses": {"qlen_1_resumed": sorted(s % 7 for s in (302, 1302, 2302))[1]},
        "seeds": [302, 1302, 2302],
    }
    assert got["observed"][0] == {
        "workload.request_rate": 2, "variant": "running", "p50_itl_ms": 32.17, "p99_itl_ms": 250.68
    }  # fmt: skip
    pairs = [(31, 32.17), (60, 250.68), (31, 29.97), (60, 41.52), (31, 36.51), (60, 68.40), (31, 36.27), (60, 57.87)]
    assert got["mean_abs_log_error"] == pytest.approx(sum(abs(math.log(s / o)) for s, o in pairs) / len(pairs))


def test_without_observations_there_is_no_error() -> None:
    other = parse_settings("scheduler.max_num_seqs=6,12", "--vary")
    got = compare(load_raw(KIMI), other, None, simulate=formula).to_json()
    assert got["observed"] is None
    assert got["mean_abs_log_error"] is None
    assert [c["variant"] for c in got["cells"]] == ["6", "12"]
    assert all("workload.request_rate" not in c for c in got["cells"])


def test_without_a_sweep_the_scenarios_own_rate_is_compared() -> None:
    got = compare(load_raw(KIMI), PAD, None, simulate=formula)
    assert [c.observed["p50_itl_ms"] for c in got.cells] == [35.50, 34.33]


def test_a_bad_value_is_refused_before_anything_runs() -> None:
    def never(scenario: Scenario, run: int) -> RunReport:
        raise AssertionError("ran")

    for text in ("speculation.pad_resumed=running,sometimes", "speculation.pad=off"):
        with pytest.raises(ConfigError, match=r"speculation\.pad"):
            compare(load_raw(KIMI), parse_settings(text, "--vary"), RATES, simulate=never)
    with pytest.raises(ConfigError, match="--seeds"):
        run_kimi(seeds=0, simulate=never)
    with pytest.raises(ConfigError, match="run 1 would have the seed"):
        compare(set_path(load_raw(KIMI), "seeds.stride", 2**32), PAD, None, seeds=2, jobs=2, simulate=never)
    with pytest.raises(ConfigError, match="--sweep"):
        compare(load_raw(KIMI), PAD, PAD, simulate=never)


def test_settings_are_yaml_and_commas_in_brackets_do_not_part_them() -> None:
    key, settings = parse_settings("graphs.capture_sizes=[4, 8],null,[16]", "--vary")
    assert key == "graphs.capture_sizes"
    assert [s.value for s in settings] == [[4, 8], None, [16]]
    for bad in ("key", "=1", "key=", "key=1,,2", "key=1,1"):
        with pytest.raises(ConfigError, match="--vary"):
            parse_settings(bad, "--vary")


def test_branches_split_at_the_widest_gap() -> None:
    got = run_kimi(seeds=4)
    steady, bistable = got.cells[0], got.cells[2]
    assert split_branches(steady, "p99_itl_ms") is None
    split = split_branches(bistable, "p99_itl_ms")
    assert split is not None
    assert (split.low, split.high, split.low_ms, split.high_ms) == (2, 2, 60.0, 240.0)
    assert split.split_ms == pytest.approx(120.0)
    assert split.observed_ms == 68.40
    assert split.observed_high is False
    assert split.share_like_observed == 0.5
    assert "2 of 4 near 240.0 ms" in text_of(report.branches_table(got))
    [entry] = [b for b in report.branches_json(got) if b["branches"]]
    assert entry["by_seed"] == {"305": 60.0, "1305": 240.0, "2305": 60.0, "3305": 240.0}


def test_one_run_has_one_branch() -> None:
    assert split_branches(run_kimi(seeds=1).cells[2], "p99_itl_ms") is None


def test_the_table_sets_simulated_beside_observed() -> None:
    lines = text_of(report.comparison_table(run_kimi())).splitlines()
    [row] = [line.split() for line in lines if line.split()[:2] == ["2", "P50"]]
    assert row == ["2", "P50", "31.00", "32.17", "-3.6%", "31.00", "29.97", "+3.4%", "+0.0%", "-6.8%"]
    assert any("over 8 values" in line for line in lines)


def test_the_table_of_runs_names_the_extreme_seeds() -> None:
    lines = text_of(report.runs_table(run_kimi())).splitlines()
    [row] = [line for line in lines if line.split()[:2] == ["5", "running"]]
    assert "60.0 (305)" in row
    assert "240.0 (1305)" in row
    assert "479 to 480" in row
    assert row.strip().endswith(f"qlen_1_resumed {sorted(s % 7 for s in (305, 1305, 2305))[1]}")


def test_many_variants_and_words_on_the_axis_can_be_drawn(tmp_path: Path) -> None:
    vary = parse_settings("speculation.pad_resumed=off,running,resumed", "--vary")
    sweep = parse_settings("scheduler.policy=fcfs,priority", "--sweep")
    got = compare(load_raw(KIMI), vary, sweep, simulate=formula)
    report.save_chart(got, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert "off" in text_of(report.comparison_table(got))


def test_saved_files(tmp_path: Path) -> None:
    got = run_kimi()
    paths = report.save_comparison(got, tmp_path / "new" / "out")
    assert [p.name for p in paths] == ["results.json", "itl.svg"]
    data = json.loads(paths[0].read_text())
    assert len(data["runs"]) == 12
    assert data["runs"][5]["trace_hash"] == f"{2302:x}"
    svg = paths[1].read_text()
    assert ET.fromstring(svg).tag.endswith("svg")
    report.save_chart(got, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == svg


def test_what_json_cannot_say_is_null_in_saved_files(tmp_path: Path) -> None:
    def nothing(scenario: Scenario, run: int) -> RunReport:
        return make_report(scenario.seed(run), math.nan, 0.0, completed=0)

    written = report.save_comparison(run_kimi(seeds=1, simulate=nothing), tmp_path)[0].read_text()
    assert "NaN" not in written
    assert "Infinity" not in written
    data = json.loads(written)
    assert data["mean_abs_log_error"] is None
    assert data["runs"][0]["p50_itl_ms"] is None


def test_the_points_of_a_comparison_are_its_cells() -> None:
    found = points(load_raw(KIMI), PAD, RATES)
    assert [(p.at and p.at.value, p.scenario.speculation.pad_resumed) for p in found] == [
        (2, "running"), (2, "resumed"), (5, "running"), (5, "resumed")
    ]  # fmt: skip
    assert [p.scenario.workload.request_rate for p in found] == [2, 2, 5, 5]


def test_the_error_of_a_cell_has_no_sign() -> None:
    below, above = run_kimi().cells[:2]
    assert below.abs_log_error("p99_itl_ms") == pytest.approx(math.log(250.68 / 60))
    assert above.abs_log_error("p99_itl_ms") == pytest.approx(math.log(60 / 41.52))
    assert below.abs_log_error("p50_ttft_ms") is None


def test_lookup_names_the_missing_field() -> None:
    assert lookup(load(KIMI), "cluster.ranks_per_node") == 4
    with pytest.raises(ConfigError, match=r"cluster\.racks"):
        lookup(load(KIMI), "cluster.racks")
