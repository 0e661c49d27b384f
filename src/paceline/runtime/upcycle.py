# SPDX-License-Identifier: Apache-2.0
"""A dense model made a mixture of experts, from its name to a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.models.registry import load_model
from paceline.models.spec import resolve_dtype
from paceline.models.upcycle import Upcycled, check_experts, upcycle


def upcycle_model(
    model: str, folder: Path, *, experts: int, top_k: int, seed: int, dtype: str, progress: Callable[[int, int], None]
) -> Upcycled:
    """Write the mixture made of ``model`` to ``folder``; see `paceline.models.upcycle.upcycle`.

    Raises:
        ValueError: numbers or a dtype that make no sense; UnsupportedModel, one of its kind, for a model that cannot be
            found, read or made a mixture.
        OSError: the folder is there already, or cannot be written.
    """
    check_experts(experts, top_k)
    loaded = load_model(model, "float32")
    stored = resolve_dtype(dtype, loaded.model.dtype)
    return upcycle(loaded, folder, experts=experts, top_k=top_k, seed=seed, dtype=stored, progress=progress)
