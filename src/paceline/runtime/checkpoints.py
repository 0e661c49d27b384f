# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that commands write."""

from __future__ import annotations

from pathlib import Path

from paceline.models.random_eagle3 import target_config, write_random_eagle3


def random_eagle3(
    target: str, out: Path, *, draft_vocab_size: int | None = None, experts: int = 0, top_k: int = 2, seed: int = 0
) -> int:
    """Write a random EAGLE-3 checkpoint for ``target`` into the folder ``out``; the size of its weights in bytes.

    Raises:
        UnsupportedModel: the target cannot be found or run.
        ValueError: a size that does not fit.
        OSError: the folder cannot be written.
    """
    config = target_config(target)
    write_random_eagle3(config, out, draft_vocab_size=draft_vocab_size, experts=experts, top_k=top_k, seed=seed)
    return sum(file.stat().st_size for file in out.glob("*.safetensors"))
