# SPDX-License-Identifier: Apache-2.0
"""Two model folders behind one engine: a model and a smaller one that drafts for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel

from paceline import SamplingParams
from paceline.core.config import ConfigError
from paceline.models.tokenizer import byte_level_tokenizer
from paceline.runtime.llm import LLM
from paceline.runtime.serving import build_engine

VOCABULARY = 256
PROMPTS = [{"prompt_token_ids": [(a * i + 3) % VOCABULARY for i in range(n)]} for a, n in ((7, 20), (5, 3), (11, 40))]


def save(folder: Path, *, layers: int, context: int = 256) -> Path:
    """A random Llama; the first layer of all of them is the same."""
    torch.manual_seed(4)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=0,
        initializer_range=0.3,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokens = ["<eos>", *sorted(ByteLevel.alphabet())[1:]]
    byte_level_tokenizer(tokens, [], pre_tokenizer="gpt-2", special=[0]).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return folder


def drafting(folder: Path, **more: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3} | more


@pytest.mark.parametrize("same", [True, False])
def test_greedy_text_is_that_of_the_model_alone(tmp_path: Path, same: bool) -> None:
    target = save(tmp_path / "target", layers=2)
    draft = target if same else save(tmp_path / "draft", layers=1)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 22}
    expected = LLM(target, **options).generate(PROMPTS, params, use_tqdm=False)
    llm = LLM(target, speculative_config=drafting(draft), **options)
    got = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [r.outputs for r in got] == [r.outputs for r in expected]
    stats = llm.stats()
    assert stats.num_draft_tokens > 0
    assert (stats.num_accepted_tokens == stats.num_draft_tokens) == same
    # The pool holds both models' KV: 2 layers and 2 or 1, of 16 tokens x (key + value) x 2 heads x 8 x 4 bytes.
    layers = 4 if same else 3
    assert llm.config.cache.num_blocks == (1 << 22) // (layers * 16 * 2 * 2 * 8 * 4)


def test_a_draft_model_with_a_shorter_context(tmp_path: Path) -> None:
    """It is refused by name, and `auto` takes the shorter of the two."""
    target, draft = save(tmp_path / "target", layers=2), save(tmp_path / "draft", layers=1, context=100)
    with pytest.raises(ConfigError, match=r"speculation\.model: its context is 100 tokens"):
        LLM(target, dtype="float32", speculative_config=drafting(draft))
    options: dict[str, Any] = {
        "model": str(target),
        "dtype": "float32",
        "seed": 0,
        "max_model_len": "auto",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "long_prefill_token_threshold": 0,
        "scheduling_policy": "fcfs",
        "block_size": 16,
        "num_gpu_blocks_override": None,
        "kv_cache_memory_bytes": None,
        "enable_prefix_caching": True,
        "speculative_config": drafting(draft),
    }
    assert build_engine(options).model.max_model_len == 100
