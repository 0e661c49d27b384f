# SPDX-License-Identifier: Apache-2.0
"""Everything that a step makes is made where the model is: fake tensors on a device that is not the CPU.

They carry shapes and devices, no numbers: an operation on tensors of two devices raises. Where the host reads a value
there is none to be had, and a path ends. The device is a made-up one, since builds of PyTorch for CPUs cannot index
fake tensors on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from paceline.core.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from paceline.core.plan import NewSequence, Row
from paceline.core.request import SamplingParams, StoredTokens
from paceline.execution.attention import PagedAttention, RowSpan
from paceline.execution.draft_model import ModelDrafter
from paceline.execution.drafter import Verified
from paceline.execution.eagle3 import Eagle3Drafter
from paceline.execution.graph_step import Buffers, GraphStep, StepShape
from paceline.execution.kvcache import KVCache
from paceline.execution.logprobs import Scoring, score
from paceline.execution.penalties import Adjustments
from paceline.execution.rejection import Verification, verify
from paceline.execution.sampler import Filters, draw, filtered, probabilities
from paceline.execution.sequence import SequenceState
from paceline.models.experts import groups_on_device
from paceline.models.spec import ExpertConfig
from tools.gpu.models import TINY, TINY_MIXTURE, random_head, random_model

_setup_privateuseone_for_python_backend("pretend")
GPU = torch.device("pretend", 0)
SHARED = replace(
    TINY,
    qkv_bias=True,
    qk_norm=True,
    experts=ExpertConfig(5, 3, 32, normalise=False, shared_intermediate_size=40),
)
SHAPES = {"dense": TINY, "mixture": TINY_MIXTURE, "shared expert": SHARED}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the host has in main memory (arrays, numbers) is real; what is computed is not."""
    # As for CUDA without a GPU: numbers become a tensor in main memory first, and no real tensor goes to the device.
    monkeypatch.setattr(FakeTensorMode, "avoid_device_init", property(lambda self: True))
    monkeypatch.setattr(fake_tensor, "CONSTANT_NUMEL_LIMIT", -1)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        yield


def until_a_read(action: Callable[[], Any]) -> None:
    with pytest.raises(DataDependentOutputException):
        action()


def test_devices_that_differ_raise() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.zeros(3, device=GPU) * torch.zeros(3)
    with pytest.raises(RuntimeError, match="same device"):
        torch.zeros(3, device=GPU).index_select(0, torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_general_path(shape: str, dtype: torch.dtype) -> None:
    """Prefill in chunks of queries, decode and verifier rows, alone and together."""
    model = random_model(SHAPES[shape], dtype, GPU)
    assert model.device == GPU
    cache = KVCache(model.config, 100, 16, dtype, GPU)
    assert cache.bits is None
    table = np.arange(1, 90)
    for spans in (
        [RowSpan(0, 300, table)],
        [RowSpan(32, 300, table)],
        [RowSpan(9, 1, table)],
        [RowSpan(9, 1, table), RowSpan(12, 1, table[50:]), RowSpan(5, 4, table[70:]), RowSpan(0, 40, table[80:])],
    ):
        count = sum(span.n for span in spans)
        tokens = torch.zeros(count, dtype=torch.int64, device=GPU)
        attention = PagedAttention(cache, spans, model.config.num_heads)
        hidden = model.forward(tokens, torch.arange(count, device=GPU), attention)
        assert hidden.device == GPU
        assert model.logits(hidden).device == GPU
    cache.clear(cache.slot_index(np.array([3]), np.array([2])))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rates", [None, (0.7, 0.5, 0.3)], ids=["standard", "synthetic"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_captured_step_reads_nothing_on_the_host(
    shape: str, rates: tuple[float, ...] | None, dtype: torch.dtype
) -> None:
    """Fake tensors hold no value that could be read."""
    model = random_model(SHAPES[shape], dtype, GPU)
    cache = KVCache(model.config, 100, 16, dtype, GPU)
    step = GraphStep(model, cache, (0, 2, 4), rates)
    largest = StepShape(4, 4, 8)
    buffers = Buffers.make(model, largest, 3)
    for shaped in (largest, StepShape(2, 4, 4), StepShape(1, 4, 8)):
        step(shaped, buffers)
    assert all(part.device == GPU for part in buffers)


@pytest.mark.parametrize(
    ("capability", "grouped"), [((8, 9), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)]
)
def test_experts_are_grouped_where_there_is_a_kernel(
    capability: tuple[int, int], grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert groups_on_device(torch.zeros(2, 8, 16, dtype=torch.bfloat16, device=GPU)) == grouped
    assert not groups_on_device(torch.zeros(2, 8, 4, dtype=torch.bfloat16, device=GPU))
    assert not groups_on_device(torch.zeros(2, 8, 16, device=GPU))


def test_sampling() -> None:
    logits = torch.zeros(3, 64, device=GPU)
    p = probabilities(logits, [1.0, 0.5, 2.0])
    until_a_read(lambda: filtered(p, [Filters(0.1, 5, 0.9)] * 3))
    assert filtered(p, [Filters(0.1)] * 3).device == GPU
    until_a_read(lambda: draw(p, [0.1, 0.2, 0.3]))
    until_a_read(lambda: score(logits, [Scoring(0, (5,), 3)]))
    rows = [Verification(0, (3, -1), 1.0, 7, 0)]
    until_a_read(lambda: verify(logits, [1, 2, 3], rows))
    until_a_read(lambda: verify(logits, [1, 2, 3], rows, (0.5, 0.5)))


def test_penalties() -> None:
    params = SamplingParams(
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        min_tokens=9,
        logit_bias={3: 1.0},
        stop_token_ids=(4,),
    )
    adjustments = Adjustments.of(params, frozenset({4}))
    assert adjustments is not None
    adjustments.apply(torch.zeros(64, device=GPU), np.array([1, 2, 3]), np.array([2, 5]))


def verified(taps: int, hidden_size: int, dtype: torch.dtype) -> Verified:
    """A step of two rows, one of which was verified."""
    rows = [Row(0, 0, 6, (), True), Row(1, 4, 4, (1, 2, 3), True)]
    states = []
    for row in rows:
        state = SequenceState(NewSequence(row.seq, "", StoredTokens(list(range(5))), SamplingParams()), 0)
        state.append([7, 8])
        state._blocks, state._num_blocks = np.arange(1, 5), 4
        states.append(state)
    tapped = [torch.zeros(10, hidden_size, dtype=dtype, device=GPU) for _ in range(taps)]
    return Verified(rows, states, [(8,), (8,)], (), [0, 6], tapped)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_drafters(method: str, dtype: torch.dtype) -> None:
    config = EngineConfig(
        scheduler=SchedulerConfig(max_model_len=128),
        cache=CacheConfig(num_blocks=40, block_size=16),
        speculation=SpeculationConfig(method=method, num_speculative_tokens=3, model="in memory"),  # type: ignore[arg-type]
    )
    target = random_model(TINY, dtype, GPU)
    if method == "draft_model":
        drafter: Any = ModelDrafter(target, config)
    else:
        drafter = Eagle3Drafter(random_head(target), config)
    assert drafter.cache.device == GPU
    until_a_read(lambda: drafter.draft(verified(len(drafter.taps), TINY.hidden_size, dtype)))
