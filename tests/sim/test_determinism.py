# SPDX-License-Identifier: Apache-2.0
"""A scenario and a seed decide a run: exactly the same in another process with another hash seed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import pytest

from paceline.sim.cluster import simulate
from paceline.sim.scenario import load

SHORT: dict[str, Any] = {"workload.num_prompts": 60, "workload.num_warmups": 4}

RUN = """
import json, sys
from dataclasses import asdict
from paceline.sim.cluster import simulate
from paceline.sim.scenario import load
overrides, run = json.loads(sys.argv[1])
print(json.dumps(asdict(simulate(load("kimi_k3_dep16", overrides), run))))
"""


def in_another_process(overrides: dict[str, Any], run: int, hash_seed: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps([overrides, run])],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("caching", [False, True])
def test_two_processes_with_different_hash_seeds_run_the_same_to_the_last_bit(caching: bool) -> None:
    overrides = {**SHORT, "cache.enable_prefix_caching": caching}
    reports = [in_another_process(overrides, 0, seed) for seed in ("1", "4242")]
    assert reports[0] == reports[1]
    here = json.loads(json.dumps(asdict(simulate(load("kimi_k3_dep16", overrides)))))
    assert here == reports[0]


def test_another_seed_or_another_policy_is_another_run() -> None:
    def trace(overrides: dict[str, Any] | None = None, run: int = 0) -> str:
        return simulate(load("kimi_k3_dep16", SHORT | (overrides or {})), run).trace_hash

    hashes = [trace(), trace(run=1), trace({"speculation.pad_resumed": "running"}), trace({"cost.jitter": 0.0})]
    assert len(set(hashes)) == len(hashes)
    assert trace() == hashes[0]
