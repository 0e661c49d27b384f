# SPDX-License-Identifier: Apache-2.0
"""Small random Llama models of transformers, saved as Hugging Face folders, and a dense attention to run ours with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel
from torch.nn import functional as F

from paceline.models.llama import Llama
from paceline.models.tokenizer import byte_level_tokenizer

VOCABULARY = 256
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class DenseAttention:
    """Causal attention of one sequence computed whole, without a cache."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        fold = q.shape[1] // k.shape[1]
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k.repeat_interleave(fold, 1), v.repeat_interleave(fold, 1)))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out[0].transpose(0, 1).flatten(1)


def our_logits(model: Llama, ids: list[int]) -> torch.Tensor:
    """[tokens, vocabulary] of one sequence."""
    with torch.inference_mode():
        hidden = model.forward(torch.tensor(ids), torch.arange(len(ids)), DenseAttention())
        return model.logits(hidden)


def save_tokenizer(folder: Path) -> None:
    """256 tokens, one a byte; 0 ends a text."""
    alphabet = sorted(ByteLevel.alphabet())
    tokens = ["<eos>", *alphabet[1:]]
    byte_level_tokenizer(tokens, [], pre_tokenizer="gpt-2", special=[0]).save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": "<eos>"}, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


FAMILIES = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
    "mistral": (transformers.MistralForCausalLM, transformers.MistralConfig),
    "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config),
}


def reference_model(family: str = "llama", **changes: Any) -> transformers.PreTrainedModel:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    model, config = FAMILIES[family]
    made = model(config(**(settings | changes))).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:  # biases start as zeros and norms as ones, which a mistake would not show
                parameter += 0.2 * torch.randn_like(parameter)
    return made


Save = Callable[..., tuple[Path, transformers.LlamaForCausalLM]]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Save a random model of the given shape; the folder and the model."""

    def save(shard_size: str = "1GB", **changes: Any) -> tuple[Path, transformers.LlamaForCausalLM]:
        model = reference_model(**changes)
        folder = tmp_path / "tiny"
        model.save_pretrained(folder, max_shard_size=shard_size)
        save_tokenizer(folder)
        return folder, model

    return save


@pytest.fixture
def reference() -> Callable[..., transformers.LlamaForCausalLM]:
    """Make a random model of the given shape."""
    return reference_model


@pytest.fixture
def logits() -> Callable[[Llama, list[int]], torch.Tensor]:
    """Logits of our model for one sequence, [tokens, vocabulary]."""
    return our_logits
