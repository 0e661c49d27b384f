# SPDX-License-Identifier: Apache-2.0
"""Options are honoured or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.core.config import ConfigError
from paceline.runtime import options
from paceline.runtime.llm import LLM
from paceline.runtime.options import speculation_config

MakeLLM = Callable[..., LLM]


def test_speculative_config_is_read() -> None:
    config = speculation_config(
        {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [0.9, 0.5, 0.1],
            "pad_resumed": "running",
        }
    )
    assert (config.method, config.num_speculative_tokens, config.pad_resumed) == ("ngram", 3, "running")
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (2, 4)
    assert config.synthetic_acceptance_rates == (0.9, 0.5, 0.1)


@pytest.mark.parametrize("key", ["prompt_lookup_min", "prompt_lookup_max"])
def test_one_lookup_length_stands_for_both(key: str) -> None:
    config = speculation_config({"method": "ngram", "num_speculative_tokens": 2, key: 7})
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (7, 7)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (
            {"method": "ngram", "num_speculative_tokens": 2, "disable_eagle_block_drop": True},
            "disable_eagle_block_drop",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1},
            "draft_tensor_parallel_size",
        ),
        ({"method": "mtp", "num_speculative_tokens": 2}, "speculative_config.method"),
        ({"method": "eagle3", "num_speculative_tokens": 2}, "speculative_config.model"),
        (
            {"method": "eagle3", "num_speculative_tokens": 2, "model": "x", "prompt_lookup_max": 3},
            "prompt_lookup_max",
        ),
        ({"num_speculative_tokens": 2}, "speculative_config.method"),
        ({"method": "ngram", "num_speculative_tokens": 2, "model": "x"}, "speculative_config.model"),
        ({"method": "draft_model", "num_speculative_tokens": 2}, "speculative_config.model"),
        ({"method": "draft_model", "num_speculative_tokens": 2, "model": 3}, "speculative_config.model"),
        (
            {"method": "draft_model", "num_speculative_tokens": 2, "model": "x", "prompt_lookup_max": 3},
            "prompt_lookup_max",
        ),
        ({"method": "ngram"}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 2, "pad_resumed": "always"}, "pad_resumed"),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "synthetic_acceptance_rates": [1, 1]},
            "synthetic_acceptance_rates",
        ),
    ],
)
def test_speculative_config_that_cannot_be_honoured_is_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        speculation_config(given)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"dtype": "bfloat16"}, "dtype: the model was loaded as torch.float32"),
        ({"max_model_len": 257}, "max_model_len"),
        ({"num_gpu_blocks_override": 20}, "kv_cache_memory_bytes"),
        ({"kv_cache_memory_bytes": 1000}, "kv_cache_memory_bytes"),
        ({"kv_cache_memory_bytes": None, "num_gpu_blocks_override": 5}, "num_blocks"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"block_size": 0}, "block_size"),
        ({"scheduling_policy": "lifo"}, "policy"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "max_num_batched_tokens": 3}, "4"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(make_llm: MakeLLM, given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        make_llm(["a"], **given)


def test_kv_cache_is_sized_by_blocks_or_memory(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    by_blocks = make_llm(["a"], kv_cache_memory_bytes=None, num_gpu_blocks_override=40)
    assert by_blocks.config.cache.num_blocks == 40
    # One layer, one head of two elements: 16 tokens x (key + value) x 2 x 4 bytes a block.
    assert make_llm(["a"], kv_cache_memory_bytes=100 * 256).config.cache.num_blocks == 100
    # Nothing said: the default, or what one request of full length (257 tokens) needs.
    monkeypatch.setattr(options, "DEFAULT_KV_CACHE_BYTES", 50 * 256)
    assert make_llm(["a"], kv_cache_memory_bytes=None).config.cache.num_blocks == 50
    monkeypatch.setattr(options, "DEFAULT_KV_CACHE_BYTES", 256)
    assert make_llm(["a"], kv_cache_memory_bytes=None).config.cache.num_blocks == 18
