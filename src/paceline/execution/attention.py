# SPDX-License-Identifier: Apache-2.0
"""Attention of a ragged batch over the paged cache.

Rows of a step differ in how many tokens they bring and how long their context is. Rows that bring the same few
tokens (decode and verifier rows) are attended together in one batched product over padded contexts; any other row
is attended alone, in chunks of queries. The query heads that share a KV head are folded into the rows of the
product, which on CPUs is several times as fast as repeating keys or leaving the grouping to SDPA.

Over a bfloat16 cache, rows of any width and context go through compiled kernels instead, which read the cache where it
lies: `paceline.models.paged`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.execution.kvcache import Array, KVCache
from paceline.models.paged import PagedRows, attend_alone
from paceline.models.team import shared_team

BATCHED_TOKENS = 16
"""Tokens per row up to which rows are attended together."""

QUERY_CHUNK = 128
"""Queries of one row attended at once: bounds the scores to heads x 128 x context, and skips keys to come."""

PADDING_RATIO = 1.5
"""Rows are attended together while the longest context is at most this many times the shortest (in blocks)."""


@dataclass(frozen=True, slots=True)
class RowSpan:
    """One row of the batch: it computes positions [start, start + n); ``table`` holds its blocks, int64."""

    start: int
    n: int
    table: Array


def batch_order(spans: Sequence[RowSpan]) -> list[int]:
    """Row indices in an order that lets rows of equal width and similar context stand together."""
    return sorted(range(len(spans)), key=lambda i: (spans[i].n, spans[i].start))


class PagedAttention:
    """Attends for all layers of one step. Tokens of the batch come row after row, in the order of ``spans``.

    ``paged``: the rows as compiled kernels take them, over a bfloat16 cache; else None.
    """

    def __init__(self, cache: KVCache, spans: Sequence[RowSpan], num_heads: int) -> None:
        self._cache = cache
        self.paged: PagedRows | None = None
        if cache.bits is not None:
            self.paged = PagedRows.of(cache.bits, [(span.start, span.n, span.table) for span in spans])
            return
        blocks, offsets = [], []
        for span in spans:
            positions = np.arange(span.start, span.start + span.n)
            blocks.append(span.table[positions // cache.block_size])
            offsets.append(positions % cache.block_size)
        self._index = cache.slot_index(np.concatenate(blocks), np.concatenate(offsets))
        fold = num_heads // cache.kv_heads
        self._groups: list[_RowGroup] = []
        first = 0
        for rows in _grouped(spans, cache.block_size):
            self._groups.append(_RowGroup(cache, rows, first, fold))
            first += sum(span.n for span in rows)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `paceline.models.llama.Attend`.

        The keys of all rows are written before any row attends: a row may read blocks that another row of the
        same step fills.
        """
        if self.paged is not None:
            qkv = torch.cat((q, k, v), 1).flatten(1).float()
            out = attend_alone(shared_team(), self.paged, layer, q.shape[1], qkv.numpy())
            return torch.from_numpy(out).to(q.dtype)
        self._cache.write(layer, self._index, k, v)
        if len(self._groups) == 1:
            return self._groups[0].attend(self._cache, layer, q)
        return torch.cat([group.attend(self._cache, layer, q) for group in self._groups])


def _grouped(spans: Sequence[RowSpan], block_size: int) -> list[Sequence[RowSpan]]:
    """Cut the batch into runs of rows that are attended together."""
    groups: list[Sequence[RowSpan]] = []
    first = 0
    for i in range(1, len(spans) + 1):
        if i < len(spans) and spans[i].n == spans[first].n <= BATCHED_TOKENS:
            low, high = sorted(_blocks(span, block_size) for span in (spans[first], spans[i]))
            if high <= PADDING_RATIO * low:
                continue
        groups.append(spans[first:i])
        first = i
    return groups


def _blocks(span: RowSpan, block_size: int) -> int:
    """Blocks that the row's context and its own tokens occupy."""
    return -(-(span.start + span.n) // block_size)


class _RowGroup:
    """Rows attended in one product: several of equal width, or a single one of any."""

    def __init__(self, cache: KVCache, spans: Sequence[RowSpan], first: int, fold: int) -> None:
        self.rows = len(spans)
        self.width = spans[0].n
        self.first = first
        self.fold = fold
        self.batch = self.rows * cache.kv_heads
        self.scale = cache.head_dim**-0.5
        self.dtype = cache.layers[0].dtype
        counts = [_blocks(span, cache.block_size) for span in spans]
        # Shorter tables are padded with block 0, which no sequence owns.
        tables = np.zeros((self.rows, max(counts)), dtype=np.int64)
        for row, (span, count) in enumerate(zip(spans, counts, strict=True)):
            tables[row, :count] = span.table[:count]
        self.index = cache.block_index(tables)
        self.starts = [span.start for span in spans]
        self.context = max(self.starts) + self.width
        self.mask = self._causal_mask() if self.width <= BATCHED_TOKENS else None

    def _causal_mask(self) -> Tensor | None:
        """What is added to the scores [batch, width * fold, context]; None when every query sees every key."""
        if self.width == 1 and min(self.starts) == max(self.starts):
            return None
        device = self.index.device
        last = torch.tensor(self.starts, device=device)[:, None] + torch.arange(self.width, device=device)
        hidden = torch.arange(self.context, device=device) > last[..., None]
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=device).masked_fill_(hidden, float("-inf"))
        shape = (self.rows, self.batch // self.rows, self.width, self.fold, self.context)
        return mask[:, None, :, None].expand(shape).reshape(self.batch, -1, self.context)

    def attend(self, cache: KVCache, layer: int, q: Tensor) -> Tensor:
        """Outputs [rows * width, heads * head_dim] of this group's tokens, from all queries of the step."""
        k, v = (x.to(q.dtype) for x in cache.read(layer, self.index, self.batch))
        count = self.rows * self.width
        q = q[self.first : self.first + count].view(self.rows, self.width, -1, self.fold, cache.head_dim)
        if self.width <= BATCHED_TOKENS:
            mask = None if self.mask is None else self.mask.to(q.dtype)
            out = self._product(q, k[:, : self.context], v[:, : self.context], mask)
            return out.reshape(count, -1)
        chunks = []
        for begin in range(0, self.width, QUERY_CHUNK):
            part = q[:, begin : begin + QUERY_CHUNK]
            seen = self.starts[0] + begin + part.shape[1]
            chunks.append(self._product(part, k[:, :seen], v[:, :seen], None, causal=True))
        return torch.cat(chunks, 1).reshape(count, -1)

    def _product(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool = False) -> Tensor:
        """Attention of ``q`` [rows, width, kv_heads, fold, head_dim]; the result has the same shape.

        ``causal``: the last keys are the queries' own positions, and no mask says so.
        """
        rows, width, kv_heads, fold, head_dim = q.shape
        folded = q.transpose(1, 2).reshape(self.batch, width * fold, head_dim)
        none = mask is None
        bias = folded.new_empty(1, 1, 1) if mask is None else mask
        scores = torch.baddbmm(bias, folded, k.transpose(1, 2), beta=0.0 if none else 1.0, alpha=self.scale)
        if causal:
            future = torch.ones(width, width, dtype=torch.bool, device=q.device).triu_(1).repeat_interleave(fold, 0)
            scores[..., -width:].masked_fill_(future, float("-inf"))
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype)
        out = torch.bmm(weights, v)
        return out.view(rows, kv_heads, width, fold, head_dim).transpose(1, 2)
