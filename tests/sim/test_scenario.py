# SPDX-License-Identifier: Apache-2.0
"""Scenario files: the shipped one is the measured cluster; anything that cannot be honoured is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.core.config import ConfigError
from paceline.sim.cluster import simulate
from paceline.sim.fields import parse_value, set_path
from paceline.sim.scenario import Cost, Scenario, load, load_raw, scenario_from, shipped, to_plain, with_seed

KIMI = "kimi_k3_dep16"


def test_the_shipped_scenario_is_the_measured_cluster() -> None:
    s = load(KIMI)
    assert (s.cluster.nodes, s.cluster.ranks_per_node, s.cluster.ranks, s.cluster.lockstep) == (4, 4, 16, True)
    assert (s.scheduler.max_num_seqs, s.scheduler.max_num_batched_tokens) == (12, 48)
    assert s.engine.speculation.width == 4
    assert s.speculation.synthetic_acceptance_rates == (0.70, 0.49, 0.3382)
    assert s.graphs.capture_sizes == (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48)
    assert s.workload.longest == 180_600
    assert s.engine.warnings() == []
    assert s.observed is not None
    assert len(s.observed.cells) == 10
    assert KIMI in shipped()


def test_every_rank_holds_a_full_house_of_the_longest_request() -> None:
    s = load(KIMI)
    spec = s.speculation
    tokens = s.workload.longest + spec.width + spec.lookahead_tokens
    assert s.cache.num_blocks - 1 >= s.scheduler.max_num_seqs * -(-tokens // s.cache.block_size)


def test_seed_of_a_run() -> None:
    s = load(KIMI, {"workload.request_rate": 5})
    assert [s.seed(i) for i in range(3)] == [305, 1305, 2305]
    assert s.workload_of(2).seed == 2305
    assert s.workload_of(2).request_rate == 5
    assert load(KIMI, {"workload.request_rate": "inf"}).seed(1) == 1300
    assert scenario_from(with_seed(load_raw(KIMI), 42)).seed(0) == 42


def test_what_show_prints_is_the_same_scenario(tmp_path: Path) -> None:
    s = load(KIMI, {"cache.groups": [{"kind": "full"}, {"kind": "sliding", "sliding_window": 128}]} | BIG_POOL)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(to_plain(s)))
    assert load(str(path)) == s


BIG_POOL = {"cache.num_blocks": 100_000}


def test_defaults_make_a_small_cluster() -> None:
    s = scenario_from({"name": "small"})
    assert s == Scenario(name="small")
    assert s.cluster.ranks == 1


def test_set_path_copies_and_may_set_null() -> None:
    raw = load_raw(KIMI)
    before = yaml.safe_dump(raw)
    assert set_path(raw, "workload.max_concurrency", None)["workload"]["max_concurrency"] is None
    assert load(KIMI, {"workload.max_concurrency": None}).workload.max_concurrency is None
    assert set_path({}, "a.b.c", 1) == {"a": {"b": {"c": 1}}}
    assert yaml.safe_dump(raw) == before


@pytest.mark.parametrize("value", ["off", False, parse_value("off")])
def test_a_bare_off_is_the_word(value: object) -> None:
    assert load(KIMI, {"speculation.pad_resumed": value}).speculation.pad_resumed == "off"


CELL = {"at": 2, "variant": "running", "p50_itl_ms": 3}


@pytest.mark.parametrize(
    ("key", "value", "field", "says"),
    [
        ("speculation.pad_resumd", "off", "speculation.pad_resumd", "did you mean pad_resumed"),
        ("clutser.nodes", 3, "clutser", "did you mean cluster"),
        ("cluster.nodes", 0, "cluster.nodes", "at least 1"),
        ("cluster.nodes", "four", "cluster.nodes", "must be an integer"),
        ("cluster.nodes", True, "cluster.nodes", "must be an integer"),
        ("cluster.lockstep", 1, "cluster.lockstep", "true or false"),
        ("cluster.node_router", "random", "cluster.node_router", "one of round_robin"),
        ("cluster", 5, "cluster", "must be a mapping"),
        ("cluster.nodes.x", 5, "cluster.nodes", "single value"),
        ("cluster.", 5, "cluster.", "not a dotted field name"),
        ("speculation.pad_resumed", "sometimes", "speculation.pad_resumed", "one of off, running, resumed"),
        (
            "speculation.synthetic_acceptance_rates",
            [0.5, 0.6, 0.1],
            "speculation.synthetic_acceptance_rates",
            "increase",
        ),
        ("speculation.synthetic_acceptance_rates", 0.5, "speculation.synthetic_acceptance_rates", "must be a list"),
        (
            "speculation.synthetic_acceptance_rates",
            [0.5, "x", 0],
            "speculation.synthetic_acceptance_rates[1]",
            "number",
        ),
        ("graphs.capture_sizes", [0], "graphs.capture_sizes", "at least 1"),
        ("cache.groups", [{"kind": "full", "window": 3}], "cache.groups[0].window", "unknown field"),
        ("cache.num_blocks", 100, "cache.num_blocks", "at least"),
        ("scheduler.max_num_batched_tokens", 3, "scheduler.max_num_batched_tokens", "at least 4"),
        ("scheduler.max_model_len", 180_000, "scheduler.max_model_len", "180600"),
        ("connector.name", "NixlConnector", "connector.name", "DecodeBenchConnector"),
        ("connector.fill_std", -1, "connector.fill_std", "at least 0"),
        ("workload.request_rate", 0, "workload.request_rate", "above 0"),
        ("workload.request_rate", [1], "workload.request_rate", "must be a number"),
        ("workload.seed", 7, "workload.seed", "seeds.base"),
        ("workload.ignore_eos", "maybe", "workload.ignore_eos", "true or false"),
        ("seeds.base", -1, "seeds.base", "at least 0"),
        ("seeds.base", 2**32, "seeds", "2**32"),
        ("cost.model", "roofline", "cost.model", "linear"),
        ("cost.step_base_ms", 0, "cost.step_base_ms", "above 0"),
        ("cost.jitter", -0.1, "cost.jitter", "at least 0"),
        ("cost.jitter", ".nan", "cost.jitter", "must be a number"),
        ("cost.eager_step_ms", "inf", "cost.eager_step_ms", "finite"),
        ("network.request_ms", -1, "network.request_ms", "at least 0"),
        ("snapshot_ms", 0.5, "snapshot_ms", "at least 1"),
        ("snapshot_ms", "inf", "snapshot_ms", "finite"),
        ("cost.eager_step_ms", 2e6, "cost.eager_step_ms", "at most 1,000,000"),
        ("cost.per_group_row_ms", 1e300, "cost.per_group_row_ms", "at most 1,000,000"),
        ("cost.jitter", 1000, "cost.jitter", "at most 100"),
        ("cost.jitter", 10**400, "cost.jitter", "must be a number"),
        ("network.response_ms", 1e300, "network.response_ms", "at most 1,000,000"),
        ("graphs.mode", "NONE", "graphs.capture_sizes", "nothing is captured"),
        ("workload.ignore_eos", False, "workload.ignore_eos", "no end-of-sequence token"),
        ("connector", {"name": "none", "fill_mean": 0.5}, "connector.fill_mean", "DecodeBenchConnector"),
        ("connector", {"name": "none", "fill_std": 0.5}, "connector.fill_std", "DecodeBenchConnector"),
        (
            "speculation",
            {"method": "eagle3", "num_speculative_tokens": 3},
            "speculation.rejection_sample_method",
            "no model to verify",
        ),
        ("cache.groups", [{}, {"kind": "full", "sliding_window": 3}], "cache.groups[1].sliding_window", "window"),
        ("cache.groups", [{}, {"kind": "sliding"}], "cache.groups[1].sliding_window", "at least 1"),
        ("name", "", "name", "empty"),
        ("observed.cells", [{"at": 2, "variant": "running"}], "observed.cells[0]", "at least one of"),
        ("observed.cells", [{"variant": "running", "p50_itl_ms": 3}], "observed.cells[0].at", "is needed"),
        ("observed.cells", [{"at": 2, "variant": "x", "p50_itl_ms": 0}], "observed.cells[0].p50_itl_ms", "above 0"),
        ("observed.cells", [], "observed.cells", "must not be empty"),
        ("observed.cells", [CELL, {**CELL, "at": 3}, CELL], "observed.cells[2]", "repeats observed.cells[0]"),
        ("observed.vary", "speculation.pad", "observed.vary", "not a field"),
        ("observed.vary", "scheduler.policy.x", "observed.vary", "not a field"),
        ("observed.sweep", "engine", "observed.sweep", "not a field"),
    ],
)
def test_what_cannot_be_is_refused_by_its_dotted_name(key: str, value: object, field: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(KIMI, {key: value})
    assert error.value.field == field
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: a\nname: b\n", "appears twice"),
        ("name: [\n", "not valid YAML"),
        ("- a\n", "must be a mapping"),
        ("{}\n", "name: is needed"),
        ("name: a\n3: b\n", "must be a mapping of field names"),
        ("name: a\ncluster: {[1]: 2}\n", "cannot be a key"),
        ("name: 2026-13-45\n", "not valid YAML"),
        ("name: " + "[" * 3000 + "\n", "not valid YAML"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load(str(path))


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"name: caf\xe9\n")
    with pytest.raises(ConfigError, match="not UTF-8 text") as error:
        load(str(path))
    assert error.value.field == str(path)


def test_a_seed_needs_a_mapping_of_seeds() -> None:
    with pytest.raises(ConfigError, match="seeds: has no field 'base'"):
        with_seed({"name": "a", "seeds": 3}, 1)
    assert scenario_from(with_seed({"name": "a", "seeds": None}, 7)).seed(0) == 7


def test_an_eager_step_costs_the_base_unless_said_otherwise() -> None:
    assert Cost(step_base_ms=7.0).eager_step_ms == 7.0
    assert Cost(step_base_ms=7.0, eager_step_ms=9.0).eager_step_ms == 9.0
    given = scenario_from({"name": "a", "cost": {"step_base_ms": 7, "eager_step_ms": None}})
    assert given.cost.eager_step_ms == 7.0
    assert scenario_from(to_plain(given)) == given


def test_without_graphs_the_base_is_what_a_step_costs() -> None:
    raw = {
        "name": "alone",
        "connector": {"name": "DecodeBenchConnector"},
        "workload": {"input_len": 100, "output_len": 20, "num_prompts": 1},
        "cost": {"per_busiest_row_ms": 2},
    }
    for base in (10.0, 30.0):
        report = simulate(scenario_from(set_path(raw, "cost.step_base_ms", base)))
        assert report.full_step_share == 0.0
        assert report.p50_itl_ms == pytest.approx(base + 2)


def test_an_unknown_name_lists_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match=KIMI):
        load("no_such_scenario")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("null", None),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ("running", "running"),
        ("[", "["),
        ("{[1]: 2}", "{[1]: 2}"),
        ("2026-13-45", "2026-13-45"),
        ("", None),
    ],
)
def test_values_on_a_command_line_are_yaml(text: str, value: Any) -> None:
    assert parse_value(text) == value
