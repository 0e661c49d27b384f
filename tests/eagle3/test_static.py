# SPDX-License-Identifier: Apache-2.0
"""Dense heads in int8, whose passes are compiled: close to the same head operation by operation, and what is drafted
behind a sequence is the same, bit for bit, in whatever steps and beside whatever rows it was computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.core.graphs import FULL
from paceline.execution.attention import PagedAttention, RowSpan
from paceline.execution.kvcache import KVCache
from paceline.models.eagle3 import Eagle3
from paceline.models.eagle3_checkpoint import load_eagle3
from paceline.models.fused import FusedLlama
from paceline.models.registry import load_model
from paceline.models.static_eagle3 import StaticEagle3
from tests.eagle3.heads import PROMPTS, SHARED, VOCABULARY, Engine, K, run_uneven, save_head

W, BLOCK = 1 + K, 4
ALL = [*PROMPTS, *SHARED, PROMPTS[0]]

Drafted = dict[tuple[int, ...], tuple[int, ...]]


@pytest.fixture(scope="module")
def target8(target_folder: Path) -> FusedLlama:
    model = load_model(target_folder, "auto", "int8").model
    assert isinstance(model, FusedLlama)
    return model


@pytest.fixture(scope="module")
def head8(target8: FusedLlama, target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Eagle3:
    return load_eagle3(save_head(target_folder, tmp_path_factory.mktemp("dense8")), target8)


@pytest.fixture(scope="module")
def alone(target8: FusedLlama, head8: Eagle3) -> Drafted:
    """What is drafted where each prompt has an engine to itself, behind all beginnings of what it says."""
    drafted: Drafted = {}
    for prompt in ALL:
        engine = Engine(target8, head8)
        engine.complete([prompt], max_tokens=40)
        drafted |= dict(engine.executor.drafted)
    return drafted


def compare(engine: Engine, alone: Drafted) -> int:
    """Check all that was drafted; behind how many beginnings."""
    config, seen = engine.config, 0
    for tokens, drafts in engine.executor.drafted:
        most = min(config.speculation.num_speculative_tokens, config.scheduler.max_model_len - len(tokens))
        assert len(drafts) == most
        if tokens in alone:
            assert drafts == alone[tokens][:most]
            seen += 1
    return seen


SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 9},
    {"max_num_batched_tokens": 40, "long_prefill_token_threshold": 7},
    {"max_num_seqs": 2},
    {"cache": {"block_size": 5}},
    {"cache": {"block_size": 16}},
    {"max_model_len": 60, "cache": {"num_blocks": 20}},
    {"speculation": {"num_speculative_tokens": 1}},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_no_draft_depends_on_its_step_or_on_other_rows(
    target8: FusedLlama, head8: Eagle3, alone: Drafted, settings: dict[str, Any]
) -> None:
    max_tokens = 11 if "max_model_len" in settings else 20
    engine = Engine(target8, head8, **settings)
    expected = Engine(target8, None).complete(ALL, max_tokens=max_tokens)
    for _ in range(2):
        assert engine.complete(ALL, max_tokens=max_tokens) == expected
    assert compare(engine, alone) > 40
    if settings.get("cache", {}).get("num_blocks"):
        assert engine.scheduler.stats.preemptions > 0


@pytest.mark.parametrize("length", range(1, 8))
def test_drafting_stops_where_the_context_ends(target8: FusedLlama, head8: Eagle3, alone: Drafted, length: int) -> None:
    """Rows near the end beside one that is not: the later passes are of fewer rows."""
    prompts = [PROMPTS[0][: 20 - length], PROMPTS[0][:5]]
    engine = Engine(target8, head8, max_model_len=24)
    outputs = engine.complete(prompts, max_tokens=50)
    assert [len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True)] == [24, 24]
    assert outputs == Engine(target8, None, max_model_len=24).complete(prompts, max_tokens=50)
    wide = Engine(target8, head8)
    wide.complete(prompts, max_tokens=50)
    assert compare(engine, dict(wide.executor.drafted)) > 2


def test_a_failed_row_leaves_the_others_their_drafts(
    target8: FusedLlama, head8: Eagle3, alone: Drafted, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Engine(target8, None).complete(PROMPTS[:2])
    used = {token for tokens in [*expected, *PROMPTS[:2], *map(list, alone.values())] for token in tokens}
    poison = next(token for token in range(VOCABULARY) if token not in used)
    embed = target8._embed

    def poisoned(tokens: Tensor) -> Tensor:
        return embed(tokens).masked_fill((tokens == poison)[:, None], float("nan"))

    monkeypatch.setattr(target8, "_embed", poisoned)
    engine = Engine(target8, head8)
    engine.begin_beside_a_failure(PROMPTS[1], poison)
    assert engine.complete(PROMPTS[:2]) == expected
    assert compare(engine, alone) > 10


def test_ranks_in_full_steps(target8: FusedLlama, head8: Eagle3, alone: Drafted) -> None:
    """Two uneven ranks in step: one prefills while the other decodes, idles at the end, and wakes for one more."""
    engines = [Engine(target8, head8, graphs=True, max_num_batched_tokens=24) for _ in range(2)]
    modes = run_uneven(engines)
    assert modes[FULL] > 20
    assert [compare(engine, alone) > 10 for engine in engines] == [True, True]


def kept(model: Eagle3, taps: list[Tensor], tokens: list[list[int]], static: bool) -> tuple[KVCache, list[list[int]]]:
    """Drafts behind sequences of known states, all positions in one pass; and the KV of the head."""
    blocks = [-(-(len(row) + K) // BLOCK) for row in tokens]
    ends = np.cumsum(blocks)
    cache = KVCache(model.config, int(ends[-1]) + 1, BLOCK, torch.bfloat16)
    tables = [np.arange(end - count, end)[::-1] + 1 for end, count in zip(ends, blocks, strict=True)]
    spans = [RowSpan(0, len(row) - 1, table) for row, table in zip(tokens, tables, strict=True)]
    lasts = np.cumsum([span.n for span in spans]) - 1
    ids = np.concatenate([row[1:] for row in tokens])
    drafts: list[list[int]] = [[] for _ in tokens]
    assert cache.bits is not None
    compiled = StaticEagle3(model, cache.bits, W, len(tokens))
    hidden = model.fuse(taps)
    compiled.fuse(taps, np.arange(len(ids)))
    for _ in range(K):
        if static:
            best = compiled.run(ids, [(span.start, span.n, span.table) for span in spans], lasts)
            compiled.keep(range(len(tokens)))
        else:
            positions = torch.from_numpy(np.concatenate([np.arange(s.start, s.start + s.n) for s in spans]))
            attention = PagedAttention(cache, spans, model.config.num_heads)
            hidden = model.forward(torch.from_numpy(ids), hidden, positions, attention)[lasts]
            best = model.best(hidden).tolist()
        for row, token in zip(drafts, best, strict=True):
            row.append(token)
        ids, lasts = np.array(best), np.arange(len(tokens))
        spans = [RowSpan(span.start + span.n, 1, span.table) for span in spans]
    return cache, drafts


@pytest.mark.parametrize("options", [{}, {"norm_before_residual": True}, {"draft_vocab_size": VOCABULARY}], ids=str)
@pytest.mark.parametrize("lengths", [[2], [5, 2, 4, 3], [90, 7, 33]], ids=str)
def test_close_to_the_head_operation_by_operation(
    target8: FusedLlama, target_folder: Path, tmp_path: Path, lengths: list[int], options: dict[str, Any]
) -> None:
    """Only the order of sums is another: of the roundings to int8 that follow few come out differently."""
    vocabulary = {name: value for name, value in options.items() if name == "draft_vocab_size"}
    model = load_eagle3(save_head(target_folder, tmp_path, **vocabulary), target8)
    model.norm_before_residual = "norm_before_residual" in options
    generator = torch.Generator().manual_seed(len(lengths))
    equal = count = 0
    with torch.inference_mode():
        for _ in range(20):
            tokens = [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
            taps = [torch.randn(sum(lengths) - len(lengths), 32, generator=generator) for _ in model.taps]
            (ours, ids), (theirs, expected) = (kept(model, taps, tokens, static) for static in (True, False))
            assert torch.allclose(ours.layers[0].float(), theirs.layers[0].float(), rtol=0.05, atol=0.05)
            equal += sum(a == b for pair in zip(ids, expected, strict=True) for a, b in zip(*pair, strict=True))
            count += K * len(lengths)
    assert equal >= 0.98 * count
