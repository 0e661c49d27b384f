# SPDX-License-Identifier: Apache-2.0
"""Ranks that a Ray cluster places."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import Server, fake_server, wait_until

pytest.importorskip("ray")
COMPLETIONS = "/v1/completions"


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Ray's own; its sockets lie there, and their names may not be long."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    monkeypatch.setenv("RAY_TMPDIR", folder)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def engines(folder: str) -> list[int]:
    """Engine processes that Ray runs in ``folder``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        # Processes of others may end or be closed to us meanwhile.
        with contextlib.suppress(OSError):
            ours = f"RAY_TMPDIR={folder}".encode() in (entry / "environ").read_bytes()
            if ours and b"paceline.runtime.engine_process" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def complete(server: Server, rank: int) -> str:
    reply = server.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 7}, {"X-data-parallel-rank": str(rank)})
    assert reply.status == 200, reply.text
    text: str = reply.json["choices"][0]["text"]
    return text


OPTIONS: dict[str, Any] = {"data_parallel_size": 2, "data_parallel_backend": "ray"}
LOCKSTEP = {"data_parallel": {"lockstep": True, "timeout_s": 60.0}}


def test_two_ranks_in_step_that_ray_has_placed(folder: str) -> None:
    with fake_server(LOCKSTEP, **OPTIONS) as server:
        assert [complete(server, rank) for rank in (0, 1, 1, 0)] == ["abcabca"] * 4
        for rank in ("0", "1"):
            assert server.metric("vllm:request_success_total", engine=rank, finished_reason="length") == 2
            wait_until(lambda rank=rank: server.metric("paceline:dummy_steps_total", engine=rank) > 0, "dummies")
        assert len(engines(folder)) == 2
    assert not engines(folder)


def test_a_rank_of_ray_that_dies_ends_the_server(folder: str) -> None:
    with fake_server(LOCKSTEP, **OPTIONS) as server:
        assert complete(server, 1) == "abcabca"
        os.kill(max(engines(folder)), signal.SIGKILL)
        assert server.wait() == 1
    wait_until(lambda: not engines(folder), "the ranks to end")
