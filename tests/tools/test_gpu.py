# SPDX-License-Identifier: Apache-2.0
"""The check that waits for a GPU: what of it can be had without one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tools.gpu import check
from tools.gpu.models import TINY, TINY_MIXTURE

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make gpu")


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([]) == check.NO_GPU
    assert "finds no GPU" in capsys.readouterr().err


def test_the_comparison_drives_every_method() -> None:
    """On the CPU against itself, where FULL steps take the general path."""
    found = check.compare("cpu")
    assert {(c.model, c.method) for c in found} == {(m, k) for m in ("dense", "mixture") for k in check.METHODS}
    assert all(c.general_equals_cpu and c.graphs_equal_cpu and c.graphs_equal_general for c in found)
    assert all(c.steps > 5 for c in found)


def test_steps_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "SIZES", (2, 4))
    monkeypatch.setattr(check, "STEPS", 2)
    timed, _ = check.time_steps("cpu", replace(TINY, num_layers=1))
    assert [t.tokens for t in timed] == [2, 4]
    assert all(t.general_ms > 0 and t.graph_ms > 0 for t in timed)


def test_sums_of_experts_are_near_in_fewer_bits() -> None:
    grouped, off = check.experts_off("cpu", TINY_MIXTURE)
    assert grouped
    assert 0.0 < off < check.NEAR
