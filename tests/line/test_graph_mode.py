# SPDX-License-Identifier: Apache-2.0
"""The decode-graph mode of ranks that share experts in int8: FULL unless told otherwise, and the same on all."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.engine.messages import ModelInfo
from paceline.server.lifecycle import banner
from paceline.server.serve import ServeOptions
from tests.line.conftest import Models
from tests.ports import free_port
from tests.server.harness import Server, running

INT8 = ["--quantization", "int8"]
LIMITS = ["--max-model-len", "64", "--max-num-seqs", "4", "--num-gpu-blocks-override", "100"]


def command(target: Path, *flags: str, mode: str | None = None) -> list[str]:
    """Two ranks; without a ``mode`` nothing is said of graphs."""
    asked = [] if mode is None else ["--compilation-config", json.dumps({"cudagraph_mode": mode})]
    ranks = ["--data-parallel-size", "2", "--enable-expert-parallel"]
    return ["-m", "paceline", "serve", str(target), "--port", "0", *LIMITS, *ranks, *asked, *flags]


def complete_on_each(server: Server) -> list[Any]:
    """The same completion from rank 0 and from rank 1."""
    body = {"prompt": [5, 6, 7], "max_tokens": 10, "ignore_eos": True, "temperature": 0}
    replies = [server.post("/v1/completions", body, {"X-data-parallel-rank": str(rank)}) for rank in (0, 1)]
    assert [reply.status for reply in replies] == [200, 200]
    return [reply.json["choices"][0]["text"] for reply in replies]


@pytest.mark.parametrize("mode", [None, "NONE"])
def test_the_mode_is_chosen_for_the_model_unless_asked_for(models: Models, mode: str | None) -> None:
    with running(command(models.target, *INT8, mode=mode)) as server:
        [first, second] = complete_on_each(server)
        assert first == second
        used = mode or "FULL_DECODE_ONLY"
        for rank in ("0", "1"):
            assert server.metric("paceline:graph_config_info", engine=rank, cudagraph_mode=used) == 1
            server.wait_metric("vllm:num_requests_running", 0, engine=rank)
            full = server.metric("paceline:steps_total", engine=rank, mode="FULL")
            assert full == (0 if mode else 9), "the prompt gives the first token, each step one of the others"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (None, "NONE, the default for this model\n"),
        ({"cudagraph_capture_sizes": [4]}, "NONE, the default for this model\n"),
        ({"cudagraph_mode": "NONE"}, "NONE\n"),
    ],
)
def test_the_start_says_who_chose(asked: dict[str, Any] | None, said: str) -> None:
    options = ServeOptions(engine={"compilation_config": asked})
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        text = banner(options, listener, ModelInfo("m", "", 10, 100, cudagraph_mode="NONE"), ("m",), 1.0)
    assert f"graphs     {said}" in text


@pytest.mark.parametrize(("method", "default"), [(None, "FULL_DECODE_ONLY"), ("ngram", "NONE")])
def test_ranks_in_different_modes_do_not_start(models: Models, method: str | None, default: str) -> None:
    """These meet at an address and compute in float32: their default depends on the drafts."""
    meeting = ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(free_port())]
    flags = [*meeting, "--quantization", "none", "--dtype", "float32"]
    if method is not None:
        flags += ["--speculative-config", json.dumps({"method": method, "num_speculative_tokens": 3})]
    other = "NONE" if default == "FULL_DECODE_ONLY" else "FULL_DECODE_ONLY"
    servers = [
        Server(command(models.target, *flags, "--data-parallel-rank", str(rank), mode=mode))
        for rank, mode in enumerate((None, other))
    ]
    threads = [threading.Thread(target=server.wait) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for server in servers:
        assert server.process.returncode == 2
        assert f"ranks 0 and 1 differ in config.graphs.mode: '{default}' and '{other}'" in "".join(server.log)
