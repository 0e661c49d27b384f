# SPDX-License-Identifier: Apache-2.0
"""Where the paged cache puts tokens, and where it finds blocks."""

from __future__ import annotations

import numpy as np
import torch

from paceline.execution.kvcache import KVCache
from paceline.models.spec import LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position=64,
    tie_word_embeddings=True,
)


def random(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, CONFIG.num_kv_heads, CONFIG.head_dim)


def test_a_block_is_one_piece_of_memory_and_its_size_is_known() -> None:
    cache = KVCache(CONFIG, 5, 4, torch.bfloat16)
    assert all(layer[3].is_contiguous() for layer in cache.layers)
    total = sum(layer[3].numel() * layer.element_size() for layer in cache.layers)
    assert KVCache.block_bytes(CONFIG, 4, torch.bfloat16) == total


def test_blocks_are_read_as_they_were_written() -> None:
    cache = KVCache(CONFIG, 9, 4, torch.float32)
    table = np.array([7, 2, 5])
    k, v = random(12), random(12)
    positions = np.arange(12)
    cache.write(1, cache.slot_index(table[positions // 4], positions % 4), k, v)
    keys, values = cache.read(1, cache.block_index(table[None]), CONFIG.num_kv_heads)
    assert torch.equal(keys.transpose(0, 1), k)
    assert torch.equal(values.transpose(0, 1), v)
    assert not cache.layers[0].any()
    assert not cache.layers[1][[0, 1, 3, 4, 6, 8]].any()


def test_clearing_leaves_the_other_slots_alone() -> None:
    cache = KVCache(CONFIG, 3, 4, torch.float32)
    both = cache.slot_index(np.array([1, 1]), np.array([0, 3]))
    for layer in range(CONFIG.num_layers):
        cache.write(layer, both, random(2), random(2))
    cache.clear(cache.slot_index(np.array([1]), np.array([3])))
    for layer in cache.layers:
        assert not layer[1, :, :, 3].any()
        assert layer[1, :, :, 0].all()
