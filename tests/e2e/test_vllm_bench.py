# SPDX-License-Identifier: Apache-2.0
"""vLLM's benchmark client, unchanged: VLLM_PYTHON names an interpreter that has it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from paceline.models.registry import load_model
from tests.server.harness import Server

VLLM_PYTHON = os.environ.get("VLLM_PYTHON", "")


@pytest.mark.skipif(not VLLM_PYTHON, reason="VLLM_PYTHON names no interpreter that has vLLM")
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
def test_vllm_bench_serve(speculating: Server, tmp_path: Path, backend: str, path: str) -> None:
    tokenizer = load_model("smollm2").tokenizer
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.eos_token}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    command = [VLLM_PYTHON, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", backend]
    command += ["--endpoint", path, "--base-url", speculating.base_url, "--model", "small"]
    command += ["--tokenizer", str(tmp_path), "--dataset-name", "random", "--random-input-len", "40"]
    command += ["--random-output-len", "12", "--num-prompts", "8", "--max-concurrency", "4", "--ignore-eos"]
    command += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"]
    subprocess.run(command, check=True, timeout=800, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (8, 0)
    assert result["total_output_tokens"] == 8 * 12
