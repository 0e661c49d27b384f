# SPDX-License-Identifier: Apache-2.0
"""The command line as a user meets it: exit codes, what goes to stdout and what to stderr, help, clear errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import paceline
from paceline.cli import main
from paceline.sim.scenario import load, scenario_from

SMALL = """
name: small
description: two nodes with two ranks each, a few short requests
scheduler: {max_num_seqs: 4, max_num_batched_tokens: 16, max_model_len: 512}
cache: {num_blocks: 1024, block_size: 16, enable_prefix_caching: false}
speculation:
  method: eagle3
  num_speculative_tokens: 3
  rejection_sample_method: synthetic
  synthetic_acceptance_rates: [0.7, 0.49, 0.3]
graphs: {mode: FULL_DECODE_ONLY}
cluster: {nodes: 2, ranks_per_node: 2}
connector: {name: DecodeBenchConnector}
workload: {input_len: 100, output_len: 20, range_ratio: 0.5, num_prompts: 24, num_warmups: 4, request_rate: 20}
cost: {step_base_ms: 20, per_busiest_row_ms: 1, eager_step_ms: 60, jitter: 0.05}
"""
PAD = "speculation.pad_resumed=running,resumed"


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return str(path)


def paceline_process(*args: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    """``python -m paceline`` in a process of its own."""
    source = str(Path(paceline.__file__).parents[1])
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": source}
    command = [sys.executable, "-m", "paceline", *args]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=170, check=False)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "sim compare"),
        (["sim"], "sim list"),
        (["sim", "run"], "--seed"),
        (["sim", "compare"], "--branches"),
        (["sim", "show"], "my_cluster.yaml"),
        (["bench"], "bench scheduler"),
        (["bench", "scheduler"], "--running"),
        (["bench", "sim"], "2, 4 and 6 requests per second"),
        (["bench", "graphs"], "--context"),
        (["demo"], "speculation"),
    ],
)
def test_help_teaches(args: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*args, "--help"]) == 0
    out = capsys.readouterr().out
    assert says in out
    assert "Usage" in out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["foo"], "foo"),
        (["sim", "foo"], "foo"),
        (["sim", "run"], "SCENARIO"),
        (["sim", "run", "no_such"], "kimi_k3_dep16"),
        (["sim", "run", "kimi_k3_dep16", "extra"], "extra"),
        (["sim", "run", "kimi_k3_dep16", "--seed", "x"], "--seed"),
        (["sim", "run", "kimi_k3_dep16", "--seed", "1.5"], "must be an integer"),
        (["sim", "run", "kimi_k3_dep16", "--set", "seeds=3", "--seed", "1"], "seeds"),
        (["sim", "run", "kimi_k3_dep16", "--set", "cluster={[1]: 2}"], "cluster: must be a mapping"),
        (["sim", "run", "kimi_k3_dep16", "--set", "name=2026-13-45", "--set", "cluster=1"], "cluster"),
        (["sim", "run", "kimi_k3_dep16", "--json", "/no/such/folder/x.json"], "--json"),
        (["sim", "run", "kimi_k3_dep16", "--out", "/dev/null/out"], "--out"),
        (["sim", "run", "kimi_k3_dep16", "--seed", "-1"], "seeds.base"),
        (["sim", "run", "kimi_k3_dep16", "--set", "cluster.nodes"], "--set"),
        (["sim", "run", "kimi_k3_dep16", "--set", "cluster.nods=1"], "did you mean nodes"),
        (["sim", "run", "kimi_k3_dep16", "--set", "cost.jitter=x"], "cost.jitter"),
        (["sim", "compare", "kimi_k3_dep16"], "--vary"),
        (["sim", "compare", "kimi_k3_dep16", "--vary", "speculation.pad_resumed"], "KEY=value"),
        (["sim", "compare", "kimi_k3_dep16", "--vary", "speculation.pad_resumed=never"], "speculation.pad_resumed"),
        (["sim", "compare", "kimi_k3_dep16", "--vary", PAD, "--seeds", "0"], "--seeds"),
        (["sim", "compare", "kimi_k3_dep16", "--vary", PAD, "--jobs", "0"], "--jobs"),
        (["sim", "compare", "kimi_k3_dep16", "--vary", PAD, "--seeds", "1.5"], "--seeds: must be an integer"),
        (["sim", "compare", "kimi_k3_dep16", "--vary", PAD, "--jobs", "2.0"], "--jobs: must be an integer"),
        (["sim", "compare", "kimi_k3_dep16", "--vary", PAD, "--json", "/no/such/folder/x.json"], "--json"),
        (["sim", "compare", "kimi_k3_dep16", "--vary", PAD, "--out", "/dev/null/out"], "--out"),
        (["sim", "run", "kimi_k3_dep16", "--json", "--seed"], "--json"),
        (["bench", "scheduler", "--running", "1,x"], "--running"),
        (["bench", "scheduler", "--running", "0"], "at least 1"),
        (["bench", "scheduler", "--num-speculative-tokens", "-1"], "--num-speculative-tokens"),
        (["bench", "scheduler", "--steps", "1.5"], "--steps: must be an integer"),
        (["bench", "scheduler", "--num-speculative-tokens", "1.5"], "--num-speculative-tokens: must be an integer"),
        (["bench", "scheduler", "--json", "/no/such/folder/x.json"], "--json"),
        (["bench", "graphs", "--sizes", "4,x"], "--sizes"),
        (["bench", "graphs", "--sizes", "4,6"], "6 is no multiple"),
        (["bench", "graphs", "--ranks", "0"], "ranks: must be an integer of at least 1"),
        (["bench", "graphs", "--context", "0"], "context"),
        (["bench", "graphs", "--json", "/no/such/folder/x.json"], "--json"),
        (["bench", "serve", "--num-prompts", "1.5"], "--num-prompts: must be an integer"),
        (["bench", "serve", "--seed", "1_000"], "--seed: must be an integer"),
        (["serve", "--max-num-seqs", "1e2"], "--max-num-seqs: must be an integer"),
        (["serve", "--max-model-len", "2.5"], "--max-model-len: must be an integer or auto"),
        (["demo", "--seeds", "True"], "--seeds: must be an integer"),
        (["demo", "--seeds", "0"], "--seeds: must be at least 1"),
        (["bench", "sim", "--json", "/no/such/folder/x.json"], "--json"),
        (["bench", "sim", "--scenario", "no_such"], "no_such"),
    ],
)
def test_an_error_is_one_clear_line_and_status_2(
    args: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("paceline: error: ")
    assert says in err


def test_a_file_that_cannot_be_written_is_an_error_too(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "run", small, "--out", small]) == 2
    err = capsys.readouterr().err
    assert "--out" in err
    assert small in err


def test_nothing_is_simulated_for_a_target_that_cannot_be_written(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A simulation that would be stuck is refused for its target instead."""
    never_answer(monkeypatch)
    out = tmp_path / "out"
    (out / "results.json").mkdir(parents=True)
    for command in (["run"], ["compare", "--vary", PAD, "--jobs", "1"]):
        assert main(["sim", *command, small, "--out", str(out)]) == 2
        assert "--out: cannot write" in capsys.readouterr().err


def test_checking_a_target_leaves_it_as_it_was(small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never_answer(monkeypatch)
    kept, absent = tmp_path / "kept.json", tmp_path / "absent.json"
    kept.write_text("kept")
    for target in (kept, absent):
        assert main(["sim", "run", small, "--json", str(target)]) == 2
    assert kept.read_text() == "kept"
    assert not absent.exists()


def never_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector that always says "later", so that no request can ever run."""

    def later(self: object, request: object, num_computed: int) -> tuple[None, bool]:
        return None, False

    monkeypatch.setattr("paceline.sim.cluster.DecodeBenchScheduler.get_num_new_matched_tokens", later)


@pytest.mark.parametrize(
    "args", [["sim", "run"], ["sim", "compare", "--vary", PAD, "--jobs", "1"], ["bench", "sim", "--scenario"]]
)
def test_a_stuck_simulation_is_one_line_and_status_2(
    args: list[str], small: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    never_answer(monkeypatch)
    assert main([*args, small]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("paceline: error: at ")
    assert "no rank can run its requests" in line


def test_a_scenario_file_that_is_not_text_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"name: caf\xe9\n")
    assert main(["sim", "run", str(path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "latin.yaml: is not UTF-8 text" in line


def test_json_has_null_where_a_figure_is_not_a_number(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--sweep", "workload.request_rate=.inf", "--jobs", "1", "--json", "-"]
    assert main(["sim", "compare", small, "--vary", PAD, *args]) == 0
    out = capsys.readouterr().out
    assert "Infinity" not in out
    assert json.loads(out)["cells"][0]["workload.request_rate"] is None


def test_prefill_is_warned_of_because_its_tokens_cost_nothing(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["run"], ["compare", "--vary", PAD, "--jobs", "1"]):
        assert main(["sim", *command, small]) == 0
        assert "prompt tokens" not in capsys.readouterr().err
        assert main(["sim", *command, small, "--set", "connector.name=none"]) == 0
        assert "warning: steps computed prompt tokens" in capsys.readouterr().err


def test_warnings_name_the_cells_they_are_about(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--set", "workload.num_prompts=4", "--jobs", "1"]
    sweep = ["--sweep", "workload.request_rate=10,20"]
    assert main(["sim", "compare", small, "--vary", "scheduler.max_num_batched_tokens=8,16", *sweep, *few]) == 0
    [line] = [line for line in capsys.readouterr().err.splitlines() if "max_num_batched_tokens = 8 " in line]
    assert line.startswith("warning: ")
    for rate in (10, 20):
        assert f"workload.request_rate={rate}, scheduler.max_num_batched_tokens=8" in line
    assert main(["sim", "compare", small, "--vary", PAD, "--set", "scheduler.max_num_batched_tokens=8", *few]) == 0
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert "pad_resumed" not in line


def test_compare_shows_what_missed_the_graph(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "compare", small, "--vary", PAD, "--jobs", "1"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "qlen_1_" in line]
    assert line.split()[0] == "running"
    assert int(line.split()[-1]) > 0


def test_version_and_the_module_entry_point() -> None:
    done = paceline_process("version")
    assert done.returncode == 0
    assert done.stdout.strip() == paceline.__version__
    assert paceline_process("nope").returncode == 2


def test_list_and_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "list"]) == 0
    assert "kimi_k3_dep16" in capsys.readouterr().out
    assert main(["sim", "show", "kimi_k3_dep16", "--set", "workload.request_rate=2"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert scenario_from(shown) == load("kimi_k3_dep16", {"workload.request_rate": 2})


def test_json_on_stdout_is_all_there_is_on_stdout(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "run", small, "--json", "-"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["scenario"] == "small"
    assert (got["completed"], got["failed"], got["seed"]) == (24, 0, 0)
    assert main(["sim", "run", small, "--seed", "5", "--json", "-"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert other["seed"] == 5
    assert other["trace_hash"] != got["trace_hash"]


def test_out_repeats_the_run(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "out"
    args = ["--set", "workload.num_prompts=10", "--seed", "3"]
    assert main(["sim", "run", small, *args, "--out", str(out)]) == 0
    assert "P99 ITL" in capsys.readouterr().out
    first = json.loads((out / "results.json").read_text())
    assert main(["sim", "run", str(out / "scenario.yaml"), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert first["completed"] == 10


def test_same_seed_same_trace_in_other_processes(small: str) -> None:
    runs = [paceline_process("sim", "run", small, "--json", "-", hash_seed=seed) for seed in ("1", "2")]
    hashes = [json.loads(done.stdout)["trace_hash"] for done in runs]
    assert hashes[0] == hashes[1]


def test_compare_gives_the_same_figures_however_many_processes(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = []
    for jobs in ("1", "2"):
        target = tmp_path / f"{jobs}.json"
        args = ["--sweep", "workload.request_rate=10,40", "--seeds", "2", "--jobs", jobs, "--json", str(target)]
        assert main(["sim", "compare", small, "--vary", PAD, *args, "--branches"]) == 0
        text = capsys.readouterr().out
        assert "running" in text
        assert "P99 ITL by seed" in text
        results.append({k: v for k, v in json.loads(target.read_text()).items() if k != "wall_s"})
    assert results[0] == results[1]
    assert [c["seeds"] for c in results[0]["cells"]] == [[0, 1000]] * 4
    assert all(c["completed"] == 24 for c in results[0]["cells"])


def test_compare_out(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["sim", "compare", small, "--vary", PAD, "--out", str(out), "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["observed"] is None
    assert "results.json" in captured.err
    assert (out / "itl.svg").read_text().startswith("<?xml")


def test_bench_scheduler_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scheduler", "--running", "1,4", "--steps", "3", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["running"] for row in rows] == [1, 4]
    assert all(row["us_per_row"] > 0 for row in rows)


def test_bench_sim_json(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sim", "--scenario", small, "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["request_rate"] for row in rows] == ["2", "4", "6", "all"]
    assert rows[-1]["busy_rank_steps"] == sum(row["busy_rank_steps"] for row in rows[:-1]) > 0
    assert "group_steps" not in rows[0]


def test_sim_and_help_work_with_torch_blocked(small: str) -> None:
    program = (
        "import sys; sys.modules['torch'] = None; from paceline.cli import main;"
        f" sys.exit(main(['--help']) or main(['sim', 'run', {small!r}]))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert "P99 ITL" in done.stdout
