# SPDX-License-Identifier: Apache-2.0
"""The size of the KV cache on a GPU, whose memory is given here; and the device option of the offline engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.core.config import ConfigError
from paceline.runtime.gpu_memory import ROUNDED_BYTES, asked_utilization, cache_bytes, step_bytes
from paceline.runtime.llm import LLM
from tools.gpu.models import TINY, random_model

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
GIB = 1 << 30
OPTIONS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 256}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    found = {"free": 10 * GIB, "total": 16 * GIB, "weights": 2 * GIB}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (found["free"], found["total"]))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: found["weights"])
    return found


def test_the_cache_gets_what_weights_and_step_leave(memory: dict[str, int]) -> None:
    model = random_model(TINY)
    found = cache_bytes(model, 4, OPTIONS, 0.5)
    step = step_bytes(TINY, model.dtype, rows=8, width=4, tokens=256, context=512)
    assert found % ROUNDED_BYTES == 0
    assert 5 * GIB - step - ROUNDED_BYTES < found <= 5 * GIB - step
    memory["weights"] += GIB
    assert cache_bytes(model, 4, OPTIONS, 0.5) == found - GIB


def test_a_share_that_is_too_small_or_taken_is_refused(memory: dict[str, int]) -> None:
    model = random_model(TINY)
    with pytest.raises(ConfigError, match=r"^gpu_memory_utilization: 0.1 leaves no memory for the KV cache"):
        cache_bytes(model, 4, OPTIONS, 0.1)
    memory["free"] = GIB
    with pytest.raises(ConfigError, match=r"^gpu_memory_utilization: 0.9 asks for more than is free: 1024 MiB"):
        cache_bytes(model, 4, OPTIONS, 0.9)


def test_a_step_needs_more_the_more_it_computes() -> None:
    sizes = {"rows": 8, "width": 4, "tokens": 256, "context": 512}
    least = step_bytes(TINY, torch.bfloat16, **sizes)
    for name in sizes:
        assert step_bytes(TINY, torch.bfloat16, **(sizes | {name: 2 * sizes[name]})) > least


def test_the_share_is_asked_for_where_it_counts() -> None:
    assert asked_utilization(None, CPU, (None, None)) is None
    assert asked_utilization(None, GPU, (None, None)) == 0.9
    assert asked_utilization(0.5, GPU, (None, None)) == 0.5
    assert asked_utilization(None, GPU, (1 << 20, None)) is None
    for given, device, sizes in (
        (0.5, CPU, (None, None)),
        (0.5, GPU, (1, None)),
        (0.5, CPU, (None, 1)),
        (1.5, GPU, ()),
    ):
        with pytest.raises(ConfigError, match=r"^gpu_memory_utilization: "):
            asked_utilization(given, device, sizes)


def test_the_offline_engine_refuses_what_it_cannot_run_on(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert make_llm(["a"], device="cpu").model.model.device == CPU
    with pytest.raises(ConfigError, match=r"^device: the model was loaded on cpu, not cuda"):
        make_llm(["a"], device="cuda")
    with pytest.raises(ConfigError, match=r"^device: cuda was asked for"):
        LLM("smollm2", device="cuda")
    with pytest.raises(ConfigError, match=r"^device: must be one of"):
        LLM("smollm2", device="gpu")
    with pytest.raises(ConfigError, match=r"^gpu_memory_utilization: "):
        make_llm(["a"], gpu_memory_utilization=0.5)
