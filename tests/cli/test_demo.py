# SPDX-License-Identifier: Apache-2.0
"""The demo: both halves run, and a base install says what the second one needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.cli import demo


def test_the_cluster_half_shows_simulated_beside_observed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "SWEEP", "workload.request_rate=6")
    demo.show_cluster(seeds=1)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    [p99] = [row for row in rows if row[:1] == ["P99"]]
    assert p99[2] == "60.31"
    assert p99[5] == "65.34"


def test_the_model_half_answers_the_same_with_speculation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "MAX_TOKENS", 12)
    demo.show_model()
    out = capsys.readouterr().out
    assert "Paris" in out
    assert "same answers: yes" in out
    assert "acceptance length" in out


def test_without_torch_it_says_how_to_get_it() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from paceline.cli import demo\n"
        "from paceline.cli.output import CommandError\n"
        "try: demo.show_model()\n"
        "except CommandError as error: print(error)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False)
    assert "needs torch: pip install 'paceline[engine]'" in done.stdout, done.stderr
