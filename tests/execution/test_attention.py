# SPDX-License-Identifier: Apache-2.0
"""Paged attention of ragged batches equals dense attention of each sequence by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from paceline.execution.attention import PagedAttention, RowSpan, batch_order
from paceline.execution.kvcache import KVCache
from paceline.models.spec import LlamaConfig

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 6, 2, 8, 4
CONFIG = LlamaConfig(
    vocab_size=8,
    hidden_size=48,
    intermediate_size=8,
    num_layers=2,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position=4096,
    tie_word_embeddings=True,
)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last len(q) positions over all of k and v ([tokens, heads, head_dim])."""
    fold = HEADS // KV_HEADS
    k, v = k.repeat_interleave(fold, 1), v.repeat_interleave(fold, 1)
    seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    out = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=seen)
    return out[0].transpose(0, 1).flatten(1)


class Case:
    """Sequences with random keys and values; what comes before each row's start is in the cache already."""

    def __init__(self, rows: list[tuple[int, int]], dtype: torch.dtype = torch.float32) -> None:
        rng = np.random.default_rng(0)
        generator = torch.Generator().manual_seed(0)
        counts = [-(-(start + n) // BLOCK_SIZE) for start, n in rows]
        pool = rng.permutation(sum(counts)) + 1
        self.cache = KVCache(CONFIG, len(pool) + 1, BLOCK_SIZE, dtype)
        tables = [t.astype(np.int64) for t in np.split(pool, np.cumsum(counts)[:-1])]
        # One slot more of room, as when blocks are allocated ahead.
        self.spans = [RowSpan(s, n, np.append(t, 0)) for (s, n), t in zip(rows, tables, strict=True)]

        def random(length: int, heads: int) -> torch.Tensor:
            return torch.randn(length, heads, HEAD_DIM, generator=generator).to(dtype)

        self.k = [random(s + n, KV_HEADS) for s, n in rows]
        self.v = [random(s + n, KV_HEADS) for s, n in rows]
        self.q = [random(n, HEADS) for _, n in rows]
        for span, k, v in zip(self.spans, self.k, self.v, strict=True):
            positions = np.arange(span.start)
            index = self.cache.slot_index(span.table[positions // BLOCK_SIZE], positions % BLOCK_SIZE)
            for layer in range(CONFIG.num_layers):
                self.cache.write(layer, index, k[: span.start], v[: span.start])

    def attend(self, order: list[int]) -> list[torch.Tensor]:
        """Outputs of the rows ``order``, in that order, run as one batch."""
        spans = [self.spans[i] for i in order]
        attention = PagedAttention(self.cache, spans, HEADS)
        k, v = (torch.cat([x[i][self.spans[i].start :] for i in order]) for x in (self.k, self.v))
        out = attention(1, torch.cat([self.q[i] for i in order]), k, v)
        return list(out.split([span.n for span in spans]))

    def expected(self, i: int) -> torch.Tensor:
        return dense(self.q[i], self.k[i], self.v[i])


ROWS = st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=8)
DECODES = st.lists(st.tuples(st.integers(0, 70), st.sampled_from([1, 4])), min_size=1, max_size=8)


@settings(deadline=None)
@given(ROWS | DECODES)
def test_ragged_batches_equal_dense_attention(rows: list[tuple[int, int]]) -> None:
    case = Case(rows)
    order = batch_order(case.spans)
    for i, out in zip(order, case.attend(order), strict=True):
        torch.testing.assert_close(out, case.expected(i), atol=1e-5, rtol=1e-5)


def test_rows_together_equal_rows_alone() -> None:
    rows = [(40, 1), (41, 1), (55, 1), (3, 4), (4, 4), (0, 30)]
    case = Case(rows)
    order = batch_order(case.spans)
    together = dict(zip(order, case.attend(order), strict=True))
    for i in range(len(rows)):
        torch.testing.assert_close(together[i], case.attend([i])[0], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("start", [0, 5, 128])
def test_long_prefills_are_attended_in_chunks(start: int) -> None:
    case = Case([(start, 300), (2, 1)])
    for i, out in enumerate(case.attend([0, 1])):
        torch.testing.assert_close(out, case.expected(i), atol=1e-5, rtol=1e-5)


def test_rows_read_what_other_rows_write_in_the_same_step() -> None:
    """The second row's first blocks are being filled by the first row, which stands after it in the batch."""
    case = Case([(0, 9), (8, 3)])
    shared = case.spans[0].table[:2]
    case.spans[1] = RowSpan(8, 3, np.concatenate((shared, case.spans[1].table[2:])))
    for x in (case.k, case.v):
        x[1][:8] = x[0][:8]
    torch.testing.assert_close(case.attend([1, 0])[0], case.expected(1), atol=1e-5, rtol=1e-5)


def test_slots_past_a_rows_context_do_not_matter() -> None:
    case = Case([(5, 1), (9, 1), (14, 1)])
    before = case.attend([0, 1, 2])
    for i, (span, length) in enumerate(zip(case.spans, (6, 10, 15), strict=True)):
        positions = np.arange(length, len(span.table[:-1]) * BLOCK_SIZE)
        index = case.cache.slot_index(span.table[positions // BLOCK_SIZE], positions % BLOCK_SIZE)
        junk = torch.full((len(positions), KV_HEADS, HEAD_DIM), 1e4 + i)
        case.cache.write(1, index, junk, junk)
    for out, again in zip(before, case.attend([0, 1, 2]), strict=True):
        assert torch.equal(out, again)


@pytest.mark.parametrize("block_size", [3, 4, 16])
@pytest.mark.parametrize("head_dim", [8, 40, 64])
def test_bfloat16(monkeypatch: pytest.MonkeyPatch, head_dim: int, block_size: int) -> None:
    """Compiled kernels have faster ways for some sizes."""
    monkeypatch.setattr(f"{__name__}.HEAD_DIM", head_dim)
    monkeypatch.setattr(f"{__name__}.BLOCK_SIZE", block_size)
    monkeypatch.setattr(f"{__name__}.CONFIG", replace(CONFIG, head_dim=head_dim))
    case = Case([(30, 1), (33, 1), (0, 40), (70, 35)], torch.bfloat16)
    for i, out in enumerate(case.attend([0, 1, 2, 3])):
        torch.testing.assert_close(out, case.expected(i), atol=3e-2, rtol=3e-2)
