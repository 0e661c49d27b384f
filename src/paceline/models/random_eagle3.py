# SPDX-License-Identifier: Apache-2.0
"""A random EAGLE-3 checkpoint for any target: it drafts nonsense at the cost of a trained one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.models.eagle3 import default_taps
from paceline.models.embedded import EMBEDDED, embedded_model_path
from paceline.models.gguf import GGUFWeights
from paceline.models.gguf_file import GGUFFile
from paceline.models.huggingface import read_config, read_json, save_json, shape_fields
from paceline.models.spec import LlamaConfig, UnsupportedModel

DRAFT_VOCABULARY = 32000
"""Tokens of the draft vocabulary, as published heads have; all of the target's if it has fewer."""


def write_random_eagle3(
    target: LlamaConfig,
    folder: Path,
    *,
    draft_vocab_size: int | None = None,
    experts: int = 0,
    top_k: int = 2,
    seed: int = 0,
) -> dict[str, Any]:
    """Write ``config.json`` and ``model.safetensors`` (bfloat16) into ``folder``; returns the configuration.

    The layer has the target's widths. With ``experts`` its MLP is a mixture of so many, of which each token takes
    ``top_k``; their inner width is such that a token costs about what the plain MLP does.

    Raises:
        ValueError: a size that does not fit the target or the other sizes.
    """
    vocabulary = min(DRAFT_VOCABULARY, target.vocab_size) if draft_vocab_size is None else draft_vocab_size
    if not 1 <= vocabulary <= target.vocab_size:
        raise ValueError(
            f"draft_vocab_size: must be 1 to {target.vocab_size}, the target's vocabulary, got {vocabulary}"
        )
    if experts and not 1 <= top_k <= experts:
        raise ValueError(f"top_k: must be 1 to {experts}, the number of experts, got {top_k}")
    config = _config(target, vocabulary, experts, top_k)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_weights(config, torch.Generator().manual_seed(seed)), folder / "model.safetensors")
    save_json(config, folder / "config.json")
    return config


def target_config(model: str) -> LlamaConfig:
    """The shape of a model, named as `paceline.models.registry.load_model` takes it, without its weights.

    Raises:
        UnsupportedModel: nothing of that name is found, or it cannot be run.
    """
    path = embedded_model_path(model) if model in EMBEDDED else Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return GGUFWeights(GGUFFile(path)).config
    if (path / "config.json").is_file():
        return read_config(read_json(path / "config.json"))
    raise UnsupportedModel(f"model {model!r}: not a known name ({', '.join(EMBEDDED)}), a .gguf file or a model folder")


def _taps(num_layers: int) -> tuple[int, ...]:
    """The usual layers, or what a smaller target has of an early, a middle and a late one."""
    try:
        return default_taps(num_layers)
    except UnsupportedModel:
        return tuple(sorted({num_layers // 4, num_layers // 2, num_layers - 1}))


def _config(target: LlamaConfig, draft_vocab_size: int, experts: int, top_k: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **shape_fields(replace(target, num_layers=1, tie_word_embeddings=False)),
        "draft_vocab_size": draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(_taps(target.num_layers)),
        "torch_dtype": "bfloat16",
    }
    if experts:
        config |= {
            "num_experts": experts,
            "num_experts_per_tok": top_k,
            "moe_intermediate_size": max(1, target.intermediate_size // top_k),
            "norm_topk_prob": True,
        }
    return config


def _weights(config: dict[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """Products keep the size of what they are given, so that drafts depend on everything that they should."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    vocabulary, drafted = config["vocab_size"], config["draft_vocab_size"]

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(torch.bfloat16)

    norms = ["norm", *(f"midlayer.{n}" for n in ("hidden_norm", "input_layernorm", "post_attention_layernorm"))]
    weights = {f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in norms}
    weights["fc.weight"] = matrix(hidden, len(config["eagle_aux_hidden_state_layer_ids"]) * hidden)
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
        weights[f"midlayer.self_attn.{name}_proj.weight"] = matrix(rows, 2 * hidden)
    weights["midlayer.self_attn.o_proj.weight"] = matrix(hidden, q)
    mlps, inner = ["midlayer.mlp."], config["intermediate_size"]
    if experts := config.get("num_experts"):
        weights["midlayer.mlp.gate.weight"] = matrix(experts, hidden)
        mlps, inner = [f"midlayer.mlp.experts.{e}." for e in range(experts)], config["moe_intermediate_size"]
    for mlp in mlps:
        weights[f"{mlp}gate_proj.weight"] = matrix(inner, hidden)
        weights[f"{mlp}up_proj.weight"] = matrix(inner, hidden)
        weights[f"{mlp}down_proj.weight"] = matrix(hidden, inner)
    weights["lm_head.weight"] = matrix(drafted, hidden)
    if drafted != vocabulary:
        ids = torch.randperm(vocabulary, generator=generator)[:drafted].sort().values
        weights["d2t"] = ids - torch.arange(drafted)
        weights["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, ids, True)
    return weights
