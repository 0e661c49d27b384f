# SPDX-License-Identifier: Apache-2.0
"""The fused path, int8 and bfloat16: close to float32, and no token depends on who shares its batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.plan import Row
from paceline.execution.attention import PagedAttention, RowSpan
from paceline.execution.kvcache import KVCache
from paceline.models.fused import FusedLlama, quantise_rows
from paceline.models.llama import Llama
from paceline.models.team import Team
from tools.gpu.models import TINY, random_weights

CONFIG = replace(TINY, vocab_size=96, intermediate_size=112, num_layers=3, num_heads=6, head_dim=16, max_position=512)
IDS = [(7 * i * i + 3) % 96 for i in range(90)]


@pytest.fixture(scope="module")
def exact() -> Llama:
    return Llama(CONFIG, torch.float32, random_weights(CONFIG))


@pytest.fixture(scope="module", params=[True, False], ids=["int8", "bfloat16"])
def fused(request: pytest.FixtureRequest) -> FusedLlama:
    return FusedLlama(CONFIG, random_weights(CONFIG), int8=request.param)


def paged_logits(model: Llama, chunks: list[int], ids: list[int] = IDS) -> torch.Tensor:
    """[tokens, vocabulary] of one sequence, computed chunk after chunk."""
    cache = KVCache(CONFIG, 40, 4, model.dtype)
    table = np.arange(39, 0, -1, dtype=np.int64)
    parts, start = [], 0
    with torch.inference_mode():
        for n in chunks:
            attention = PagedAttention(cache, [RowSpan(start, n, table)], CONFIG.num_heads)
            tokens, positions = torch.tensor(ids[start : start + n]), torch.arange(start, start + n)
            parts.append(model.logits(model.forward(tokens, positions, attention)))
            start += n
    return torch.cat(parts)


def test_logits_are_close_to_float32(fused: FusedLlama, exact: Llama) -> None:
    """Random weights are harsher than trained ones: bfloat16 is 3% off here, and int8 10%."""
    expected = paged_logits(exact, [90])
    for chunks in ([90], [17, 73], [80, *[1] * 10], [60, 16, 14]):
        error = (paged_logits(fused, chunks) - expected).std() / expected.std()
        assert 0 < error < (0.15 if fused.quantization else 0.05), chunks


def test_a_quantised_weight_is_at_most_half_a_step_off() -> None:
    weight = torch.randn(20, 30)
    weight[3] = 0.0
    rounded, scale = quantise_rows(weight)
    assert ((rounded * scale[:, None] - weight).abs().amax(1) <= 0.51 * weight.abs().amax(1) / 127).all()


def test_a_huge_token_costs_its_neighbours_no_precision(exact: Llama) -> None:
    """Activations are scaled token by token: one of a thousand times the size changes no bit of another's result."""
    huge = random_weights(CONFIG)

    def get(name: str) -> torch.Tensor:
        tensor = huge(name)
        if "embed_tokens" in name:
            tensor = tensor.clone()
            tensor[5] *= 1000
        return tensor

    model = FusedLlama(CONFIG, get, int8=True)
    with torch.inference_mode():
        hidden = torch.stack([torch.randn(64), 1000 * torch.randn(64)])
        assert torch.equal(model.logits(hidden)[0], model.logits(hidden[:1])[0])


@pytest.mark.parametrize("int8", [True, False])
@pytest.mark.parametrize("width", [1, 3])
def test_a_row_is_the_same_alone_and_in_a_batch(width: int, int8: bool) -> None:
    """Bit by bit: sums are taken in the same order whatever the batch, and attention reads a row's own context only."""
    model = FusedLlama(CONFIG, random_weights(CONFIG), int8=int8)
    cache = KVCache(CONFIG, 120, 4, model.dtype)
    contexts = [30, 7, 19, 55]
    tables = np.split(np.random.default_rng(0).permutation(119)[:116] + 1, 4)
    spans = [RowSpan(start, width, table.astype(np.int64)) for start, table in zip(contexts, tables, strict=True)]

    def run(spans: list[RowSpan]) -> torch.Tensor:
        ids = torch.tensor([(3 * s.start + i) % 96 for s in spans for i in range(s.n)])
        positions = torch.cat([torch.arange(s.start, s.start + s.n) for s in spans])
        with torch.inference_mode():
            return model.logits(model.forward(ids, positions, PagedAttention(cache, spans, CONFIG.num_heads)))

    for span in spans:
        run([RowSpan(0, span.start, span.table)])
    together = run(spans).split(width)
    for span, logits in zip(spans, together, strict=True):
        assert torch.equal(run([span]), logits)


@pytest.mark.parametrize("chunks", [[80, 4, 6], [90], [33, 57]])
def test_tokens_of_a_wider_row_are_those_of_single_ones(fused: FusedLlama, chunks: list[int]) -> None:
    """A verifier row yields what decode rows would have, so that speculation changes no token; so does a prefill."""
    assert torch.equal(paged_logits(fused, chunks), paged_logits(fused, [80, *[1] * 10]))


def test_helper_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for size in (1, 3):
        monkeypatch.setattr("paceline.models.fused.shared_team", lambda size=size: Team(size))
        results.append(paged_logits(FusedLlama(CONFIG, random_weights(CONFIG), int8=True), [70, *[1] * 20]))
    assert torch.equal(*results)


def test_the_layers_in_one_call_are_the_layers_one_by_one(fused: FusedLlama) -> None:
    """An attention that is not compiled gets rotated queries and keys, layer after layer."""
    cache = KVCache(CONFIG, 40, 4, fused.dtype)
    paged = PagedAttention(cache, [RowSpan(0, 90, np.arange(39, 0, -1, dtype=np.int64))], CONFIG.num_heads)
    with torch.inference_mode():
        hidden = fused.forward(torch.tensor(IDS), torch.arange(90), lambda *args: paged(*args))
        assert torch.equal(fused.logits(hidden), paged_logits(fused, [90]))


@pytest.mark.parametrize("int8", [True, False])
def test_a_poisoned_token_fails_its_own_row_alone(make_driver: Callable[..., Any], int8: bool) -> None:
    source = random_weights(CONFIG)

    def get(name: str) -> torch.Tensor:
        tensor = source(name)
        if "embed_tokens" in name:
            tensor = tensor.clone()
            tensor[7] = float("nan")
        return tensor

    driver = make_driver(model=FusedLlama(CONFIG, get, int8=int8))
    driver.add(1, [1, 2, 3])
    driver.add(2, [1, 7, 3])
    result = driver.run(Row(1, 0, 3, (), True), Row(2, 0, 3, (), True))
    assert set(result.errors) == {1}
    assert len(result.sampled[0]) == 1
    assert result.sampled[1] == ()
