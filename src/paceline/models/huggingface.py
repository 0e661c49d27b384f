# SPDX-License-Identifier: Apache-2.0
"""Llama models from a Hugging Face folder: config.json, safetensors (sharded or not), tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.models.llama import Llama
from paceline.models.spec import LlamaConfig, LoadedModel, RopeScaling, UnsupportedModel, resolve_dtype
from paceline.models.tokenizer import Tokenizer

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnsupportedModel(f"{path.parent}: {path.name} is missing") from None
    except ValueError as error:
        raise UnsupportedModel(f"{path}: not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise UnsupportedModel(f"{path}: must hold a JSON object")
    return found


class _Shards:
    """Weights of a folder, each read from the shard that has it."""

    def __init__(self, folder: Path) -> None:
        if (folder / _INDEX).exists():
            index = _read_json(folder / _INDEX)
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


def load_huggingface(folder: Path, dtype: str = "auto", name: str | None = None) -> LoadedModel:
    """Load a folder as ``save_pretrained`` writes it.

    Raises:
        UnsupportedModel: a file is missing or the model needs what this engine lacks.
        ValueError: ``dtype`` is not auto, float32 or bfloat16.
    """
    raw = _read_json(folder / "config.json")
    config = read_config(raw)
    shards = _Shards(folder)
    _refuse_unused(shards.names, config)
    first = shards.get("model.embed_tokens.weight")
    torch_dtype = resolve_dtype(dtype, first.dtype)
    tokenizer, eos_token = _tokenizer(folder)
    return LoadedModel(
        name=name or folder.resolve().name,
        model=Llama(config, torch_dtype, lambda weight: shards.get(weight).to(torch_dtype)),
        tokenizer=tokenizer,
        eos_token_ids=_eos_token_ids(folder, raw, tokenizer, eos_token),
    )


def read_config(raw: dict[str, Any]) -> LlamaConfig:
    """The model's shape from ``config.json``.

    Raises:
        UnsupportedModel: an architecture or feature outside the plain Llama family, by name.
    """
    architectures = raw.get("architectures") or ["LlamaForCausalLM"]
    if architectures != ["LlamaForCausalLM"] or raw.get("model_type", "llama") != "llama":
        raise UnsupportedModel(
            f"architectures: {', '.join(architectures)} (model_type {raw.get('model_type')!r}) is not supported,"
            " only LlamaForCausalLM is"
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
        max_position=raw["max_position_embeddings"],
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        rope_scaling=_rope_scaling(rope),
    )


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


def _refuse_unused(names: set[str], config: LlamaConfig) -> None:
    """A weight that nothing would read means that the model is not the one its configuration describes."""
    layer = (
        "input_layernorm",
        "post_attention_layernorm",
        *(f"self_attn.{p}_proj" for p in "qkvo"),
        *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
    )
    known = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    known |= {f"model.layers.{i}.{part}.weight" for i in range(config.num_layers) for part in layer}
    # Old checkpoints store what the configuration already says.
    unused = sorted(n for n in names - known if not n.endswith("rotary_emb.inv_freq"))
    if unused:
        raise UnsupportedModel(f"weights without a place in a Llama model: {', '.join(unused[:5])}")


def _tokenizer(folder: Path) -> tuple[Tokenizer, str | None]:
    if not (folder / "tokenizer.json").exists():
        raise UnsupportedModel(f"{folder}: tokenizer.json is missing (other tokenizer formats are not read)")
    path = folder / "tokenizer_config.json"
    config = _read_json(path) if path.exists() else {}
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
    generation = _read_json(path) if path.exists() else {}
    found: list[int] = []
    if eos_token is not None and (eos := tokenizer.backend.token_to_id(eos_token)) is not None:
        found.append(eos)
    for ids in (generation.get("eos_token_id"), raw.get("eos_token_id")):
        found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    return tuple(dict.fromkeys(found))
