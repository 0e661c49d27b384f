# SPDX-License-Identifier: Apache-2.0
"""Llama, Mistral, Qwen2 and Qwen3 models, and the mixtures of experts among them, from Hugging Face folders:
config.json, safetensors, tokenizer.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.models.build import build_model
from paceline.models.experts import ExpertExchange
from paceline.models.spec import ExpertConfig, LlamaConfig, LoadedModel, RopeScaling, UnsupportedModel
from paceline.models.tokenizer import Tokenizer

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""Architecture -> model_type, as ``config.json`` names them."""
_MIXTRAL = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}
"""Parts of a weight's name in the other families -> those of Mixtral."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model folder; UnsupportedModel if it holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnsupportedModel(f"{path.parent}: {path.name} is missing") from None
    except ValueError as error:
        raise UnsupportedModel(f"{path}: not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise UnsupportedModel(f"{path}: must hold a JSON object")
    return found


class Shards:
    """Weights of a folder, each read from the shard that has it."""

    def __init__(self, folder: Path) -> None:
        if (folder / _INDEX).exists():
            index = read_json(folder / _INDEX)
            self._files = {name: folder / file for name, file in index["weight_map"].items()}
        elif (folder / _SINGLE).exists():
            with safe_open(folder / _SINGLE, "pt") as weights:
                self._files = dict.fromkeys(weights.keys(), folder / _SINGLE)
        else:
            raise UnsupportedModel(f"{folder}: neither {_SINGLE} nor {_INDEX} is there (other formats are not read)")

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def get(self, name: str) -> Tensor:
        file = self._files.get(name)
        if file is None:
            raise UnsupportedModel(f"the weights lack {name}")
        try:
            with safe_open(file, "pt") as weights:
                tensor: Tensor = weights.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UnsupportedModel(f"{file}: cannot read {name}: {error}") from error
        return tensor


def load_huggingface(
    folder: Path,
    dtype: str = "auto",
    name: str | None = None,
    quantization: str | None = None,
    parallel: ExpertExchange | None = None,
    device: torch.device | None = None,
) -> LoadedModel:
    """Load a folder as ``save_pretrained`` writes it; of a mixture, the experts that this rank of ``parallel`` holds.

    It runs on ``device``; None: the CPU.

    Raises:
        UnsupportedModel: a file is missing or the model needs what this engine lacks.
        ValueError: ``dtype`` or ``quantization`` is none of the known ones.
    """
    raw = read_json(folder / "config.json")
    config = read_config(raw)
    shards = Shards(folder)
    stored_name = _mixtral_name if raw.get("model_type") == "mixtral" else str
    _refuse_unused(shards.names, config, stored_name)
    stored = shards.get("model.embed_tokens.weight").dtype
    tokenizer, eos_token = _tokenizer(folder)
    return LoadedModel(
        name=name or folder.resolve().name,
        model=build_model(
            config, lambda weight: shards.get(stored_name(weight)), dtype, quantization, stored, parallel, device
        ),
        tokenizer=tokenizer,
        eos_token_ids=_eos_token_ids(folder, raw, tokenizer, eos_token),
    )


def read_config(raw: dict[str, Any]) -> LlamaConfig:
    """The model's shape from ``config.json``.

    Within a sliding window, attention is plain attention: a model that has one gets it as its context length.

    Raises:
        UnsupportedModel: an architecture or feature outside the families above, by name.
    """
    architecture = (raw.get("architectures") or ["LlamaForCausalLM"])[0]
    family = FAMILIES.get(architecture)
    if family is None or raw.get("model_type", family) != family:
        raise UnsupportedModel(
            f"architectures: {architecture} (model_type {raw.get('model_type')!r}) is not supported,"
            f" only {', '.join(FAMILIES)} are"
        )
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method", "unknown")
        raise UnsupportedModel(f"quantization_config: {method!r} weights are not supported; use an unquantised model")
    for key, plain in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        if raw.get(key, plain) != plain:
            raise UnsupportedModel(f"{key}: {raw[key]!r} is not supported, only {plain!r} is")
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
    rope = {**(raw.get("rope_parameters") or {}), **(raw.get("rope_scaling") or {})}
    return LlamaConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or hidden // heads,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta", raw.get("rope_theta", 10000.0)),
        max_position=int(min(raw["max_position_embeddings"], _window(raw, family))),
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        rope_scaling=_rope_scaling(rope),
        qkv_bias=family == "qwen2" or (family == "qwen2_moe" and raw.get("qkv_bias", True)),
        qk_norm=family.startswith("qwen3"),
        experts=_experts(raw, family),
    )


def shape_fields(config: LlamaConfig) -> dict[str, Any]:
    """What `read_config` reads a model's shape from, but for its family, its experts, and scaled rotations."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, of a model with ``context`` tokens."""
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "chat_template": tokenizer.chat_template,
        "model_max_length": context,
    }
    save_json({key: value for key, value in about.items() if value is not None}, folder / "tokenizer_config.json")


def save_json(fields: dict[str, Any], path: Path) -> None:
    """Write what `read_json` reads."""
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _experts(raw: dict[str, Any], family: str) -> ExpertConfig | None:
    """The mixture of a model whose family has one; a Qwen model may keep a plain MLP in some layers."""
    if family != "mixtral" and not family.endswith("_moe"):
        return None
    # transformers 5 writes num_local_experts for Qwen3 too, everybody else num_experts.
    count = raw["num_experts"] if "num_experts" in raw else _needed(raw, "num_local_experts")
    top_k = _needed(raw, "num_experts_per_tok")
    if family == "mixtral":
        return ExpertConfig(count, top_k, raw["intermediate_size"], normalise=True)
    step, dense = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or ()
    layers = range(raw["num_hidden_layers"])
    return ExpertConfig(
        num_experts=count,
        top_k=top_k,
        intermediate_size=_needed(raw, "moe_intermediate_size"),
        normalise=raw.get("norm_topk_prob", False),
        shared_intermediate_size=_needed(raw, "shared_expert_intermediate_size") if family == "qwen2_moe" else 0,
        dense_layers=frozenset(i for i in layers if i in dense or not count or (i + 1) % step),
    )


def _needed(raw: dict[str, Any], key: str) -> int:
    """A number without which there is no mixture."""
    if not isinstance(raw.get(key), int):
        raise UnsupportedModel(f"{key}: must be an integer in the config.json of a mixture, got {raw.get(key)!r}")
    number: int = raw[key]
    return number


def _window(raw: dict[str, Any], family: str) -> float:
    """The sliding window in tokens, infinite where none is used: Qwen's configurations name one, switched off."""
    window = raw.get("sliding_window")
    if window is None or (family.startswith("qwen") and not raw.get("use_sliding_window", False)):
        return math.inf
    return float(window)


def _rope_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor: {rope['partial_rotary_factor']} is not supported, only 1 is")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", factor=rope["factor"])
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_max_position=rope["original_max_position_embeddings"],
        )
    raise UnsupportedModel(f"rope_type: {kind!r} is not supported (default, linear and llama3 are)")


def _mixtral_name(name: str) -> str:
    """Mixtral's name of a weight."""
    for ours, theirs in _MIXTRAL.items():
        name = name.replace(ours, theirs)
    return name


def _refuse_unused(names: set[str], config: LlamaConfig, stored_name: Callable[[str], str]) -> None:
    """A weight that nothing would read means that the model is not the one its configuration describes."""
    layer = [f"{part}.weight" for part in ("input_layernorm", "post_attention_layernorm")]
    layer += [f"self_attn.{p}_proj.weight" for p in "qkvo"]
    layer += [f"self_attn.{p}_proj.bias" for p in "qkv"] if config.qkv_bias else []
    layer += [f"self_attn.{p}_norm.weight" for p in "qk"] if config.qk_norm else []
    known = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for i in range(config.num_layers):
        known |= {f"model.layers.{i}.{part}" for part in layer}
        known |= {stored_name(f"model.layers.{i}.mlp.{part}.weight") for part in _mlp_parts(config.experts, i)}
    # Old checkpoints store what the configuration already says.
    unused = sorted(n for n in names - known if not n.endswith("rotary_emb.inv_freq"))
    if unused:
        raise UnsupportedModel(f"weights without a place in a Llama model: {', '.join(unused[:5])}")


def _mlp_parts(experts: ExpertConfig | None, layer: int) -> list[str]:
    """Names of the weights that stand for the MLP of ``layer``."""
    projections = [f"{p}_proj" for p in ("gate", "up", "down")]
    if experts is None or layer in experts.dense_layers:
        return projections
    parts = ["gate", *(f"experts.{e}.{p}" for e in range(experts.num_experts) for p in projections)]
    if experts.shared_intermediate_size:
        parts += ["shared_expert_gate", *(f"shared_expert.{p}" for p in projections)]
    return parts


def _tokenizer(folder: Path) -> tuple[Tokenizer, str | None]:
    if not (folder / "tokenizer.json").exists():
        raise UnsupportedModel(f"{folder}: tokenizer.json is missing (other tokenizer formats are not read)")
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.exists() else {}
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    if (folder / "chat_template.jinja").exists():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    bos, eos = _text(config.get("bos_token")), _text(config.get("eos_token"))
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json", chat_template=template, bos_token=bos, eos_token=eos)
    return tokenizer, eos


def _text(token: Any) -> str | None:
    """A special token, written as a string or as an object with its ``content``."""
    return token.get("content") if isinstance(token, dict) else token


def _eos_token_ids(folder: Path, raw: dict[str, Any], tokenizer: Tokenizer, eos_token: str | None) -> tuple[int, ...]:
    """Ids that end a text: the tokenizer's first, then those of the generation and model configuration."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    found: list[int] = []
    if eos_token is not None and (eos := tokenizer.backend.token_to_id(eos_token)) is not None:
        found.append(eos)
    for ids in (generation.get("eos_token_id"), raw.get("eos_token_id")):
        found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    return tuple(dict.fromkeys(found))
