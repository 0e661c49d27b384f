# SPDX-License-Identifier: Apache-2.0
"""Worker half of DecodeBench: writes made-up KV where a prefill side would have delivered real one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.connectors.decode_bench.scheduler import Fill
from paceline.core.plan import TransferEvent


class DecodeBenchWorker:
    """Fills blocks before the forward pass of the step that reads them.

    Floating-point buffers get ``mean``, or normal(``mean``, ``std``) numbers from a generator of their own; any other
    buffer gets zeros, and so does every layer of a group named in ``zeroed`` (recurrent states).
    """

    def __init__(self, mean: float = 0.015, std: float = 0.0, *, seed: int = 0, zeroed: Sequence[int] = ()) -> None:
        self.mean = mean
        self.std = std
        self.filled_tokens = 0
        self._zeroed = frozenset(zeroed)
        self._groups: list[list[Tensor]] = []
        self._generator = torch.Generator().manual_seed(seed)

    def register_kv_caches(self, caches: Sequence[Sequence[Tensor]]) -> None:
        """The layers of each cache group, a drafter's among them; every layer [num_blocks, ...]."""
        self._groups = [list(layers) for layers in caches]

    def start_load_kv(self, meta: Sequence[Fill]) -> None:
        """Fill the blocks of all requests; complete on return."""
        for fill in meta:
            for group, blocks in enumerate(fill.blocks):
                if blocks:
                    self._fill(group, torch.tensor(blocks))
            self.filled_tokens += fill.tokens

    def _fill(self, group: int, blocks: Tensor) -> None:
        blocks = blocks.to(self._groups[group][0].device)
        for layer in self._groups[group]:
            if group in self._zeroed or not layer.is_floating_point():
                layer.index_fill_(0, blocks, 0)
            elif self.std == 0.0:
                layer.index_fill_(0, blocks, self.mean)
            else:
                shape = (len(blocks), *layer.shape[1:])
                noise = torch.randn(shape, generator=self._generator) * self.std + self.mean
                layer.index_copy_(0, blocks, noise.to(device=layer.device, dtype=layer.dtype))

    def wait_for_layer_load(self, layer: int) -> None:
        """Nothing is under way."""

    def save_kv_layer(self, layer: int, cache: Tensor) -> None:
        """Nobody reads what is decoded here."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def get_finished(self) -> Sequence[TransferEvent]:
        """Loads are synchronous: no event ends them."""
        return ()

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        """Filling cannot fail."""
        return frozenset()

    def handle_preemptions(self, seqs: Sequence[int]) -> None:
        """No transfer reads the blocks."""

    def shutdown(self) -> None:
        """Holds nothing."""
