# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a GGUF file, from its metadata alone: clients that only make prompts need no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf

from paceline.models.spec import UnsupportedModel
from paceline.models.tokenizer import Tokenizer, byte_level_tokenizer


def read_tokenizer(get: Callable[..., Any]) -> Tokenizer:
    """The tokenizer that GGUF metadata describes: byte-level BPE (``gpt2``) only."""
    model = get("tokenizer.ggml.model")
    if model != "gpt2":
        raise UnsupportedModel(f"tokenizer.ggml.model: {model!r} is not supported, only byte-level BPE ('gpt2') is")
    tokens: list[str] = get("tokenizer.ggml.tokens")
    types: list[int] = get("tokenizer.ggml.token_type", [gguf.TokenType.NORMAL] * len(tokens))
    bos = get("tokenizer.ggml.bos_token_id", None)
    eos = get("tokenizer.ggml.eos_token_id", None)
    return Tokenizer(
        byte_level_tokenizer(
            tokens,
            get("tokenizer.ggml.merges"),
            pre_tokenizer=get("tokenizer.ggml.pre", "default"),
            special=[i for i, t in enumerate(types) if t == gguf.TokenType.CONTROL],
            added=[i for i, t in enumerate(types) if t == gguf.TokenType.USER_DEFINED],
            bos=bos if get("tokenizer.ggml.add_bos_token", False) else None,
        ),
        chat_template=get("tokenizer.chat_template", None),
        bos_token=None if bos is None else tokens[bos],
        eos_token=None if eos is None else tokens[eos],
    )
