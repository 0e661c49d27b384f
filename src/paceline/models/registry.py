# SPDX-License-Identifier: Apache-2.0
"""From a model's name to a model: a known name, a GGUF file, or a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.models.embedded import EMBEDDED, embedded_model_path
from paceline.models.experts import ExpertExchange
from paceline.models.gguf import load_gguf
from paceline.models.huggingface import load_huggingface
from paceline.models.spec import LoadedModel, UnsupportedModel


def load_model(
    model: str | Path,
    dtype: str = "auto",
    quantization: str | None = None,
    *,
    parallel: ExpertExchange | None = None,
    device: torch.device | None = None,
) -> LoadedModel:
    """Load ``model``: ``smollm2``, the path of a ``.gguf`` file, or a folder with a ``config.json``.

    ``quantization`` of the weights: int8, none, or None: int8 where they are stored quantised and ``dtype`` is auto.
    ``parallel``: the ranks over which a mixture's experts are spread, each reading its own; a dense model is the same
    on every rank. None: a single rank. ``device``: where its weights go and it runs; None: the CPU.

    Raises:
        UnsupportedModel: nothing of that name is found, or it cannot be run.
        ValueError: ``dtype`` or ``quantization`` is none of the known ones.
    """
    name = str(model)
    if name in EMBEDDED:
        return load_gguf(embedded_model_path(name), dtype, name, quantization, device)
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return load_gguf(path, dtype, quantization=quantization, device=device)
    if (path / "config.json").is_file():
        return load_huggingface(path, dtype, quantization=quantization, parallel=parallel, device=device)
    raise UnsupportedModel(
        f"model {name!r}: not a known name ({', '.join(EMBEDDED)}), not a .gguf file and not a folder with a"
        " config.json; models are not downloaded"
    )
