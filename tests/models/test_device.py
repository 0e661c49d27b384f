# SPDX-License-Identifier: Apache-2.0
"""Where a model runs, and in what arithmetic: what is refused, by name. GPUs are counted, none is used."""

from __future__ import annotations

import pytest
import torch

from paceline.core.config import ConfigError
from paceline.models.device import arithmetic_on, resolve_device
from paceline.models.experts import Mixture, Routed
from tools.gpu.models import TINY, TINY_MIXTURE, random_model

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine with two; which one this process was told to use."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_auto_takes_what_there_is(no_gpus: None) -> None:
    assert resolve_device("auto") == resolve_device("cpu") == CPU


def test_each_local_rank_takes_a_gpu_of_its_own(gpus: list[torch.device]) -> None:
    assert resolve_device("auto") == GPU
    assert resolve_device("cuda", local_rank=1, local_ranks=2) == torch.device("cuda", 1)
    assert gpus == [GPU, torch.device("cuda", 1)]
    assert resolve_device("cpu", local_ranks=9) == CPU


def test_more_local_ranks_than_gpus_are_refused(gpus: list[torch.device]) -> None:
    with pytest.raises(ConfigError, match=r"^device: 3 ranks run here, each on a GPU of its own, and PyTorch finds 2"):
        resolve_device("auto", local_rank=0, local_ranks=3)


def test_cuda_without_a_gpu_is_refused(no_gpus: None) -> None:
    with pytest.raises(ConfigError, match=r"^device: cuda was asked for"):
        resolve_device("cuda")


def test_other_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^device: must be one of auto, cpu, cuda"):
        resolve_device("tpu")


def test_arithmetic_on_a_gpu() -> None:
    assert arithmetic_on(CPU, "auto", None) == ("auto", None)
    assert arithmetic_on(CPU, "auto", "int8") == ("auto", "int8")
    assert arithmetic_on(GPU, "auto", None) == ("bfloat16", "none")
    assert arithmetic_on(GPU, "float32", "none") == ("float32", "none")
    with pytest.raises(ConfigError, match=r"^quantization: int8 runs on CPUs only"):
        arithmetic_on(GPU, "auto", "int8")


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_a_draft_model_in_float32_may_end_as_its_target_does(rows: int) -> None:
    """A head of EAGLE-3 without weights of its own gives float32 hidden states to the target's."""
    target = random_model(TINY, torch.bfloat16)
    hidden = torch.randn(rows, TINY.hidden_size, generator=torch.Generator().manual_seed(3))
    assert torch.equal(target.logits(hidden), target.logits(hidden.to(torch.bfloat16)))


@pytest.mark.parametrize("first", [0, 2])
def test_products_that_cannot_be_grouped_yield_the_same(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """Every own expert computes every token; a choice of none, or of another rank's expert, adds nothing."""
    mixture = random_model(TINY_MIXTURE).layers[0].experts
    assert isinstance(mixture, Mixture)
    mixture.own = range(first, 4)
    assert isinstance(mixture.gate_up, torch.Tensor)
    assert isinstance(mixture.down, torch.Tensor)
    mixture.gate_up, mixture.down = mixture.gate_up[first:], mixture.down[first:]
    generator = torch.Generator().manual_seed(2)
    experts = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(9)])
    routed = Routed(torch.randn(9, 64, generator=generator), experts, torch.rand(9, 2, generator=generator))
    expected = mixture.compute_grouped(routed)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(mixture.compute_static(routed), expected, atol=1e-5, rtol=1e-5)
    monkeypatch.setattr("paceline.models.experts.groups_on_device", lambda *weights: False)
    torch.testing.assert_close(mixture.compute_static(routed), expected, atol=1e-5, rtol=1e-5)
