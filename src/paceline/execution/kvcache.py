# SPDX-License-Identifier: Apache-2.0
"""The paged KV cache: one tensor a layer, and the indices by which tokens and blocks are found in it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.models.spec import LlamaConfig

Array = np.ndarray

CPU = torch.device("cpu")


def placed(values: Array, device: torch.device) -> Tensor:
    """``values`` as a tensor on ``device``; on the CPU it is the same memory."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


class KVCache:
    """Keys and values of all layers, each layer [num_blocks, 2, kv_heads, block_size, head_dim].

    A block is contiguous, its keys before its values, so that it can be moved as one piece. Within it a head's
    tokens are contiguous, so that one gather yields what a batched product over heads reads. All slots
    start at zero: a masked slot has weight 0, and 0 times a number that is not finite would not be 0.
    """

    def __init__(
        self, config: LlamaConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device = CPU
    ) -> None:
        self.device = device
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        shape = (num_blocks, 2, config.num_kv_heads, block_size, config.head_dim)
        whole = _zeros((config.num_layers, *shape), dtype, device)
        self.layers = list(whole)
        self._slots = [layer.view(-1, config.head_dim) for layer in self.layers]
        self._pieces = [layer.view(-1, block_size * config.head_dim) for layer in self.layers]
        compiled = dtype == torch.bfloat16 and device.type == "cpu"
        self.bits = whole.view(torch.uint16).numpy() if compiled else None
        """All layers of a bfloat16 cache on the CPU as `paceline.models.paged` reads them: as uint16."""
        # Offsets of the heads' keys and values within a block, in slots and in pieces (one head of one block).
        heads = np.arange(2 * self.kv_heads, dtype=np.int64).reshape(2, self.kv_heads)
        self._head_slots = heads * block_size
        self._head_pieces = heads
        self._heads_on_device = placed(heads, device)

    @staticmethod
    def block_bytes(config: LlamaConfig, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block over all layers."""
        elements = config.num_layers * 2 * config.num_kv_heads * block_size * config.head_dim
        return elements * dtype.itemsize

    def slot_index(self, blocks: Array, offsets: Array) -> tuple[Tensor, Tensor]:
        """Where `write` puts the keys and the values of tokens, given each token's block and offset within it."""
        first = blocks * (2 * self.kv_heads * self.block_size) + offsets
        index = placed(first[None, :, None] + self._head_slots[:, None, :], self.device).view(2, -1)
        return index[0], index[1]

    def write(self, layer: int, index: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> None:
        """Store ``k`` and ``v`` [tokens, kv_heads, head_dim] at the slots of ``index``."""
        slots = self._slots[layer]
        # An EAGLE-3 head computes in float32 whatever its cache keeps.
        slots.index_copy_(0, index[0], k.reshape(-1, self.head_dim).to(slots.dtype))
        slots.index_copy_(0, index[1], v.reshape(-1, self.head_dim).to(slots.dtype))

    def block_index(self, tables: Array) -> Tensor:
        """Where `read` finds the blocks of ``tables`` [rows, blocks]."""
        pieces = tables[None, :, None, :] * (2 * self.kv_heads) + self._head_pieces[:, None, :, None]
        return placed(pieces.reshape(-1), self.device)

    def slot_index_on_device(self, blocks: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """`slot_index` of tensors [tokens], int64, without a word to the host."""
        first = blocks * (2 * self.kv_heads * self.block_size) + offsets
        index = (first[None, :, None] + self._heads_on_device[:, None, :] * self.block_size).view(2, -1)
        return index[0], index[1]

    def block_index_on_device(self, tables: Tensor) -> Tensor:
        """`block_index` of a tensor [rows, blocks], int64."""
        pieces = tables[None, :, None, :] * (2 * self.kv_heads) + self._heads_on_device[:, None, :, None]
        return pieces.reshape(-1)

    def read(self, layer: int, index: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, tokens, head_dim] of gathered blocks, ``batch`` = rows * kv_heads."""
        kv = self._pieces[layer].index_select(0, index).view(2, batch, -1, self.head_dim)
        return kv[0], kv[1]

    def heal(self, blocks: Sequence[int]) -> None:
        """Zero whatever is not finite in ``blocks``, in all layers."""
        index = placed(np.array(blocks, dtype=np.int64), self.device)
        for layer in self.layers:
            layer.index_copy_(0, index, torch.nan_to_num(layer[index], 0.0, 0.0, 0.0))

    def clear(self, index: tuple[Tensor, Tensor]) -> None:
        """Zero the slots of ``index`` in all layers."""
        for slots in self._slots:
            for part in index:
                slots.index_fill_(0, part, 0.0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU they take memory only once they are written: the system hands out zeroed pages at the first
    touch."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)
