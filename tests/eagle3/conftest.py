# SPDX-License-Identifier: Apache-2.0
"""One target for all tests of EAGLE-3, and its heads."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.models.eagle3 import Eagle3
from paceline.models.eagle3_checkpoint import load_eagle3
from paceline.models.llama import Llama
from paceline.models.registry import load_model
from tests.eagle3.heads import Reference, save_head, save_target


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def target(target_folder: Path) -> Llama:
    return load_model(target_folder, "float32").model


@pytest.fixture(scope="session", params=["dense", "experts"])
def head_folder(request: pytest.FixtureRequest, target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    experts = 4 if request.param == "experts" else 0
    return save_head(target_folder, tmp_path_factory.mktemp(request.param), experts=experts)


@pytest.fixture(scope="session")
def head(target: Llama, head_folder: Path) -> Eagle3:
    return load_eagle3(head_folder, target)


@pytest.fixture(scope="session")
def reference(target_folder: Path, head_folder: Path) -> Reference:
    return Reference(target_folder, head_folder)
