# SPDX-License-Identifier: Apache-2.0
"""Engines around a real model whose weights make it recite: it says given pieces of text in order, then ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel

from paceline.models.llama import Llama
from paceline.models.spec import LlamaConfig, LoadedModel
from paceline.models.tokenizer import Tokenizer, byte_level_tokenizer
from paceline.runtime.llm import LLM

EOS, START, FIRST = 0, 1, 2
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}<start>"
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]


def as_token(piece: str | bytes) -> str:
    """A piece in the alphabet of byte-level vocabularies."""
    others = [b for b in range(256) if b not in _PRINTABLE]
    letters = {b: chr(b) for b in _PRINTABLE} | {b: chr(256 + i) for i, b in enumerate(others)}
    return "".join(letters[b] for b in (piece.encode() if isinstance(piece, str) else piece))


def recite(pieces: Sequence[str | bytes], poison: int | None = None) -> LoadedModel:
    """A model that follows <start> with ``pieces`` (ids 2, 3, ...), each after the one before, then <eos>.

    Embeddings are one-hot, the layer adds nothing, and the head maps each token to its successor; any other token is
    followed by <eos>. ``poison``: an id whose embedding is not a number.
    """
    spoken = [as_token(piece) for piece in pieces]
    tokens = ["<eos>", "<start>", *spoken, *(a for a in sorted(ByteLevel.alphabet()) if a not in spoken)]
    size = len(tokens) + len(tokens) % 2
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=size,
        intermediate_size=4,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position=256,
        tie_word_embeddings=False,
    )
    embedding = torch.eye(len(tokens), size)
    if poison is not None:
        embedding[poison] = float("nan")
    head = torch.zeros(len(tokens), size)
    chain = [START, *range(FIRST, FIRST + len(pieces)), EOS]
    head[EOS] = 1.0
    for before, after in pairwise(chain):
        head[after, before] = 2.0
    fixed = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    shapes = {"q_proj": (2, size), "k_proj": (2, size), "v_proj": (2, size), "o_proj": (size, 2)}
    shapes |= {"gate_proj": (4, size), "up_proj": (4, size), "down_proj": (size, 4)}

    def get(name: str) -> torch.Tensor:
        kind = name.split(".")[-2]
        return fixed[name] if name in fixed else torch.zeros(shapes[kind]) if kind in shapes else torch.ones(size)

    backend = byte_level_tokenizer(tokens, [], pre_tokenizer="gpt-2", special=[EOS, START])
    return LoadedModel(
        name="recital",
        model=Llama(config, torch.float32, get),
        tokenizer=Tokenizer(backend, chat_template=TEMPLATE, eos_token="<eos>"),
        eos_token_ids=(EOS,),
    )


MakeLLM = Callable[..., LLM]


@pytest.fixture
def make_llm() -> MakeLLM:
    """An engine that recites ``pieces``; further arguments are the engine's."""

    def make(pieces: Sequence[str | bytes], *, poison: int | None = None, **options: Any) -> LLM:
        return LLM(recite(pieces, poison), **({"kv_cache_memory_bytes": 1 << 20} | options))

    return make


@pytest.fixture
def make_tokenizer() -> Callable[[Sequence[str | bytes]], Tokenizer]:
    """The tokenizer of such an engine; piece i has id i + 2."""
    return lambda pieces: recite(pieces).tokenizer
