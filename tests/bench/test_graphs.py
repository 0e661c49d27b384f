# SPDX-License-Identifier: Apache-2.0
"""``paceline bench graphs`` on a small mixture, one rank and two real ones; what it cannot measure it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from paceline.bench.graphs import GraphOptions
from paceline.cli import main
from paceline.core.config import ConfigError
from tests.eagle3.heads import save_target
from tests.parallel.mixtures import save_mixture

COMPARED = {"exchange", "tokens", "general_ms", "general_p90_ms", "static_ms", "static_p90_ms", "ratio"}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    save_mixture(folder, "mixtral")
    return folder


def test_both_paths_are_timed_without_the_exchange_and_with_it(
    mixture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--sizes", "4,8", "--context", "20", "--steps", "3", "--json", "-"]
    assert main(["bench", "graphs", "--model", str(mixture), *asked]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["model"], result["ranks"], result["context"], result["steps"]) == (str(mixture), 2, 20, 3)
    rows = result["rows"]
    assert [(row["exchange"], row["tokens"]) for row in rows] == [
        ("excluded", 4),
        ("excluded", 8),
        ("included", 4),
        ("included", 8),
    ]
    for row in rows:
        assert set(row) == COMPARED
        assert 0 < row["general_ms"] <= row["general_p90_ms"]
        assert 0 < row["static_ms"] <= row["static_p90_ms"]
        assert row["ratio"] == pytest.approx(row["general_ms"] / row["static_ms"])


def test_a_rank_on_its_own_exchanges_nothing(mixture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--ranks", "1", "--sizes", "3", "--num-speculative-tokens", "0", "--context", "5", "--steps", "1"]
    assert main(["bench", "graphs", "--model", str(mixture), *asked]) == 0
    out = capsys.readouterr().out
    assert "excluded" in out
    assert "included" not in out


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_model_without_a_static_backend_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: str
) -> None:
    assert main(["bench", "graphs", "--model", str(save_target(tmp_path)), "--sizes", "4", "--ranks", ranks]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "model: has no static backend" in err
    assert "Traceback" not in err


def test_a_model_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "graphs", "--model", str(tmp_path / "nowhere"), "--sizes", "4"]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sizes": (4, 6)}, "sizes"),
        ({"sizes": ()}, "sizes"),
        ({"ranks": 0}, "ranks"),
        ({"context": 0}, "context"),
        ({"steps": 0}, "steps"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        GraphOptions(model=Path("model"), **changes)  # type: ignore[arg-type]
    assert refused.value.field == field


def test_a_rank_that_dies_is_an_error_and_no_wait(
    mixture: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of two ranks ends before they meet; the other would wait for half an hour."""
    program = (
        "import json, runpy, sys, io; text = sys.stdin.read();"
        "sys.exit('rank 1 is gone') if json.loads(text)['rank'] else None;"
        "sys.stdin = io.StringIO(text); runpy.run_module('paceline.runtime.step_times', run_name='__main__')"
    )
    monkeypatch.setattr("paceline.bench.graphs.RANK_PROGRAM", (sys.executable, "-c", program))
    assert main(["bench", "graphs", "--model", str(mixture), "--sizes", "4", "--steps", "1"]) == 2
    assert "rank 1 is gone" in capsys.readouterr().err
