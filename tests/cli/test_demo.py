# SPDX-License-Identifier: Apache-2.0
"""The demo: its parts run, say what they need, and leave no process behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.cli import demo, demo_serving
from paceline.cli.output import CommandError
from tests.server.harness import alive, children


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
    assert "needs torch: pip install 'paceline[engine,serve]'" in done.stdout, done.stderr


def test_the_served_part_streams_a_chat_and_shows_a_benchmark(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_serving, "CHAT_TOKENS", 12)
    monkeypatch.setattr(demo_serving, "QUESTION", "What is the capital of France? Answer in one sentence.")
    short = ("--prompt-token-ids", "--random-input-len", "8", "--random-output-len", "4", "--num-prompts", "2")
    monkeypatch.setattr(demo_serving, "BENCH", short)
    before = children(os.getpid())
    demo_serving.show_server()
    out = capfd.readouterr().out
    answer, _, table = out.partition("paceline bench serve")
    assert "Paris" in answer
    assert " tokens; the first after " in answer
    rows = [line.split(":") for line in table.splitlines()]
    assert {row[0]: row[1].strip() for row in rows if len(row) == 2}["Successful requests"] == "2"
    assert "has ended" in table.splitlines()[-1]
    assert not any(map(alive, children(os.getpid()) - before))


def test_without_the_openai_package_the_chat_is_skipped_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    demo_serving.chat("http://127.0.0.1:9")
    assert "pip install openai" in capsys.readouterr().out


def test_a_chat_that_fails_is_an_error_in_one_line() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(CommandError, match="the chat failed"):
            demo_serving.chat(f"http://127.0.0.1:{unused.getsockname()[1]}")
