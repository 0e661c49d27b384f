# SPDX-License-Identifier: Apache-2.0
"""Small random mixtures of transformers with distinct experts, saved as Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel

from paceline.models.tokenizer import byte_level_tokenizer

VOCABULARY = 256
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "initializer_range": 0.3,
}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    # Numbers of experts that 2 and 4 ranks share evenly, unevenly, and so that a rank of 4 has none.
    "mixtral": (
        transformers.MixtralForCausalLM,
        transformers.MixtralConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen2_moe": (
        transformers.Qwen2MoeForCausalLM,
        transformers.Qwen2MoeConfig,
        {
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 32,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "num_hidden_layers": 4,
        },
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeForCausalLM,
        transformers.Qwen3MoeConfig,
        {
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "head_dim": 16,
        },
    ),
}


def reference_model(family: str, **changes: Any) -> Any:
    """A random model of transformers in float32; its experts differ, as do its norms and biases from their defaults."""
    torch.manual_seed(0)
    model, config, own = FAMILIES[family]
    made = model(config(**(SHAPE | own | changes))).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return made


def save_mixture(folder: Path, family: str, **changes: Any) -> Any:
    """Write a model with a tokenizer of one token a byte, of which 0 ends a text; the model."""
    model = reference_model(family, **changes)
    model.save_pretrained(folder)
    tokens = ["<eos>", *sorted(ByteLevel.alphabet())[1:]]
    byte_level_tokenizer(tokens, [], pre_tokenizer="gpt-2", special=[0]).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return model


def reference_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """[tokens, vocabulary] of one sequence."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def reference_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """The ``count`` most likely tokens, one after the other."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(reference_logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]
