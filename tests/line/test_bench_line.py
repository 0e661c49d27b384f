# SPDX-License-Identifier: Apache-2.0
"""The before/after experiment itself, on real ranks of a small random mixture, as the demo runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli import demo_line
from paceline.cli.output import CommandError
from tests.line.conftest import Models

RATE, PROMPTS = 8.0, 24


def bench(models: Models, *more: str) -> tuple[str, ...]:
    flags = {
        "--model": models.target,
        "--draft": models.head,
        "--quantization": "none",
        "--request-rates": RATE,
        "--num-prompts": PROMPTS,
        "--input-len": 40,
        "--output-len": 12,
    }
    return (*(str(part) for flag in flags.items() for part in flag), "--no-profile", *more)


def test_the_line_holds_after_and_not_before(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_line, "BENCH", bench(models, "--json", str(tmp_path / "line.json")))
    demo_line.show_line()
    shown = capfd.readouterr().out
    assert "qlen_1_resumed" in shown
    assert "8/s resumed" in shown, "the chart"
    result = json.loads((tmp_path / "line.json").read_text())
    [measured] = result["rates"]
    lengths = [measured[side]["acceptance_length"] for side in ("before", "after")]
    assert min(lengths) <= result["acceptance_length"] <= max(lengths)
    assert f"{result['acceptance_length']:.3f} tokens a verification; the rates given come to 2.528" in shown
    before, after = measured["before"], measured["after"]
    for side in (before, after):
        assert (side["completed"], side["failed"]) == (PROMPTS, 0)
        assert side["idle_rank_admissions"] > 0
        assert side["group_steps"] > PROMPTS
        assert side["p99_itl_ms"] >= side["p50_itl_ms"] > 0
        assert 1.5 < side["acceptance_length"] < 3.5, "2.5282 on average"
    assert (measured["request_rate"], after["full_step_share"], after["misses"]) == (RATE, 1.0, {})
    assert before["full_step_share"] < 1.0
    assert set(before["misses"]) == {"qlen_1_resumed"}


def test_a_folder_without_a_model_is_named(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_line, "BENCH", bench(Models(tmp_path, models.head)))
    with pytest.raises(CommandError, match="the line ended with status"):
        demo_line.show_line()
    assert f"--model: no vocab_size in '{tmp_path}/config.json'" in capfd.readouterr().err.replace("\n", " ")
