# SPDX-License-Identifier: Apache-2.0
"""A decode step that a graph can capture: forward, logits and verification over buffers that stay where they are.

Nothing here reads a value on the host, and no shape depends on one. A row that is not there is inert: it computes token
0 at the positions from 0 on, in block 0 alone, which no sequence owns; it goes to no expert, and nobody reads what it
yields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.core.graphs import FULL
from paceline.execution.kvcache import Array, KVCache
from paceline.execution.rejection import accepted_counts
from paceline.models.experts import Mixture
from paceline.models.llama import Llama, Taps


class Inputs(NamedTuple):
    """Parts of the packed input of a step, int64; of tensors on the device, or of arrays on the host.

    ``tokens`` [rows * width]; ``starts`` [rows], first position of each row; ``live`` [rows], 0 for an inert row;
    ``drafts`` and ``numbers`` [rows, width - 1], the latter the bits of float64 numbers in [0, 1); ``tables``
    [rows, blocks], block 0 behind the end of a row.
    """

    tokens: Any
    starts: Any
    live: Any
    drafts: Any
    numbers: Any
    tables: Any


@dataclass(frozen=True, slots=True)
class StepShape:
    """Rows of a step, tokens of a row, and blocks of its table."""

    rows: int
    width: int
    blocks: int

    @property
    def tokens(self) -> int:
        return self.rows * self.width

    @property
    def words(self) -> int:
        """Length of the packed input: tables stand last, so that what is copied is as long as they are."""
        return self.rows * (2 + self.width + 2 * (self.width - 1) + self.blocks)

    def split(self, packed: Tensor | Array) -> Inputs:
        """Views of the parts of ``packed``."""
        shapes = ((self.tokens,), (self.rows,), (self.rows,), *[(self.rows, self.width - 1)] * 2)
        parts, first = [], 0
        for shape in (*shapes, (self.rows, self.blocks)):
            size = shape[0] * shape[1] if len(shape) == 2 else shape[0]
            parts.append(packed[first : first + size].reshape(shape))
            first += size
        return Inputs(*parts)


class Buffers(NamedTuple):
    """What every captured step reads (``packed``) and writes (the others), in the largest size; see `GraphStep`."""

    packed: Tensor
    hidden: Tensor
    logits: Tensor
    verdicts: Tensor
    tapped: Tensor

    @classmethod
    def make(cls, model: Llama, shape: StepShape, taps: int) -> Buffers:
        """Zeros, which are a step of inert rows; ``shape``: the largest. ``taps``: how many."""
        c, device = model.config, model.device
        hidden = torch.zeros(shape.tokens, c.hidden_size, dtype=model.dtype, device=device)
        return cls(
            torch.zeros(shape.words, dtype=torch.int64, device=device),
            hidden,
            torch.zeros(shape.tokens, c.vocab_size, dtype=torch.float32, device=device),
            torch.zeros(shape.rows, 4, dtype=torch.int64, device=device),
            hidden.new_zeros(taps, shape.tokens, c.hidden_size),
        )


class GraphStep:
    """One decode step of a model over a cache; call it with a shape and the buffers.

    It writes hidden states, logits and tapped states of all tokens, and in ``verdicts`` per row: drafts accepted, the
    token behind them, whether its hidden states are finite, whether the best logit of each position is.
    """

    def __init__(self, model: Llama, cache: KVCache, taps: tuple[int, ...], rates: Sequence[float] | None) -> None:
        """``rates``: of synthetic verification (see `rejection.verify`); None: drafts are accepted that are right."""
        self.model = model
        self.cache = cache
        self.taps = taps
        self._rates = None if rates is None else torch.tensor(rates, dtype=torch.float64, device=model.device)
        self._mixtures = [layer.experts for layer in model.layers if isinstance(layer.experts, Mixture)]

    def __call__(self, shape: StepShape, buffers: Buffers) -> None:
        """Compute what ``buffers.packed`` says."""
        inputs = shape.split(buffers.packed)
        offsets = torch.arange(shape.width, device=self.model.device)
        positions = inputs.starts[:, None] + offsets
        if self.model.exchange is not None:
            inert = (inputs.live == 0)[:, None].expand(-1, shape.width).reshape(-1)
            self.model.exchange.begin(FULL, shape.tokens, inert)
        attention = TableAttention(self.cache, inputs.tables, positions, self.model.config.num_heads)
        taps = Taps(self.taps)
        kept = [mixture.static for mixture in self._mixtures]
        try:
            for mixture in self._mixtures:
                mixture.static = True
            hidden = self.model.forward(inputs.tokens, positions.reshape(-1), attention, taps)
        finally:
            for mixture, static in zip(self._mixtures, kept, strict=True):
                mixture.static = static
        logits = self.model.logits(hidden)
        buffers.hidden[: shape.tokens].copy_(hidden)
        buffers.logits[: shape.tokens].copy_(logits)
        for i, state in enumerate(taps.states):
            buffers.tapped[i, : shape.tokens].copy_(state)
        buffers.verdicts[: shape.rows].copy_(self._verify(shape, inputs, hidden, logits))

    def _verify(self, shape: StepShape, inputs: Inputs, hidden: Tensor, logits: Tensor) -> Tensor:
        by_row = (shape.rows, shape.width)
        top, best = logits.max(-1)
        best = best.view(by_row)
        numbers = inputs.numbers.view(torch.float64)
        accepted = accepted_counts(best, inputs.drafts, numbers, self._rates)
        token = best.gather(1, accepted[:, None])[:, 0]
        finite = hidden.sum(-1).isfinite().view(by_row).all(1)
        sound = top.isfinite().view(by_row).all(1)
        return torch.stack((accepted, token, finite.to(torch.int64), sound.to(torch.int64)), 1)


class TableAttention:
    """Attention of rows of equal width over block tables of equal length, both on the device."""

    def __init__(self, cache: KVCache, tables: Tensor, positions: Tensor, num_heads: int) -> None:
        """``tables`` [rows, blocks] and ``positions`` [rows, width], int64."""
        self._cache = cache
        self._rows, self._width = positions.shape
        self._fold = num_heads // cache.kv_heads
        blocks = tables.gather(1, positions // cache.block_size)
        self._slots = cache.slot_index_on_device(blocks.reshape(-1), (positions % cache.block_size).reshape(-1))
        self._pieces = cache.block_index_on_device(tables)
        context = torch.arange(tables.shape[1] * cache.block_size, device=tables.device)
        self._hidden = (context > positions[..., None])[:, None, :, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `paceline.models.llama.Attend`; the keys of all rows are written before any row attends."""
        cache, rows, width, fold = self._cache, self._rows, self._width, self._fold
        cache.write(layer, self._slots, k, v)
        batch = rows * cache.kv_heads
        keys, values = cache.read(layer, self._pieces, batch)
        folded = q.view(rows, width, cache.kv_heads, fold, cache.head_dim).transpose(1, 2)
        folded = folded.reshape(batch, width * fold, cache.head_dim)
        nothing = folded.new_empty(1, 1, 1)
        scores = torch.baddbmm(nothing, folded, keys.transpose(1, 2), beta=0.0, alpha=cache.head_dim**-0.5)
        scores.view(rows, cache.kv_heads, width, fold, -1).masked_fill_(self._hidden, float("-inf"))
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype)
        out = torch.bmm(weights, values).view(rows, cache.kv_heads, width, fold, cache.head_dim)
        return out.transpose(1, 2).reshape(rows * width, -1)
