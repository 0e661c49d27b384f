# SPDX-License-Identifier: Apache-2.0
"""Llama and Qwen2 models from GGUF files: weights dequantised, tokenizer and chat template from the metadata."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.models.build import build_model
from paceline.models.gguf_file import FloatArray, GGUFFile
from paceline.models.gguf_tokenizer import read_tokenizer
from paceline.models.spec import LlamaConfig, LoadedModel, RopeScaling, UnsupportedModel

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ARCHITECTURES = ("llama", "qwen2")
_ROPE_FACTORS = "rope_freqs.weight"
_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_gguf(
    path: Path,
    dtype: str = "auto",
    name: str | None = None,
    quantization: str | None = None,
    device: torch.device | None = None,
) -> LoadedModel:
    """Load a GGUF file of architecture ``llama`` or ``qwen2``, to run on ``device`` (None: the CPU).

    Raises:
        UnsupportedModel: the architecture, a tensor, the rope scaling or the tokenizer is not supported.
        ValueError: ``dtype`` or ``quantization`` is none of the known ones.
    """
    file = GGUFFile(path)
    weights = GGUFWeights(file)
    stored = _STORED.get(file.tensors["blk.0.attn_q.weight"].tensor_type.name, torch.uint8)
    return LoadedModel(
        name=name or path.stem,
        model=build_model(weights.config, weights.get, dtype, quantization, stored, device=device),
        tokenizer=read_tokenizer(file.get),
        eos_token_ids=_eos_token_ids(file.get),
    )


class GGUFWeights:
    """The weights of a file under Hugging Face's names, as float32. ``names``: those that it has."""

    def __init__(self, file: GGUFFile) -> None:
        """Read the model's shape.

        Raises:
            UnsupportedModel: the architecture, a tensor or the rope scaling is not supported.
        """
        self._file = file
        self.config = config = read_config(file.get, file.tensors, file.tensor)
        self._names = _weight_names(config)
        unknown = sorted(set(file.tensors) - set(self._names.values()) - {_ROPE_FACTORS})
        if unknown:
            raise UnsupportedModel(f"{file.path}: tensors without a place in a Llama model: {', '.join(unknown[:5])}")
        # Only the converter of Llama models reorders rows.
        interleaved = file.get("general.architecture") == "llama"
        self._heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if interleaved else {}

    @property
    def names(self) -> list[str]:
        return [name for name, stored in self._names.items() if stored in self._file.tensors]

    def get(self, name: str) -> Tensor:
        """One weight.

        Raises:
            UnsupportedModel: it is not there, or of a type that cannot be dequantised.
        """
        tensor = torch.from_numpy(self._file.tensor(self._names[name]))
        heads = self._heads.get(name.split(".")[-2])
        return tensor if heads is None else half_split_rows(tensor, heads)


def half_split_rows(weight: Tensor, heads: int) -> Tensor:
    """Rows of a q or k projection [heads * head_dim, in] from GGUF's rotary order to the half-split one.

    GGUF keeps the two members of a rotary pair in neighbouring rows (x0, y0, x1, y1, ...); here, as in Hugging
    Face, all first members of a head come before all second ones (x0, x1, ..., y0, y1, ...).
    """
    rows, columns = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def read_config(
    get: Callable[..., Any], tensors: dict[str, Any], tensor: Callable[[str], FloatArray] | None = None
) -> LlamaConfig:
    """The model's shape from GGUF metadata (``get(key[, default])``) and the names of its tensors."""
    name = get("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedModel(f"general.architecture: {name!r} is not supported, only {', '.join(ARCHITECTURES)} are")
    if experts := get(f"{name}.expert_count", 0):
        raise UnsupportedModel(f"{name}.expert_count: a mixture of {experts} experts is not supported")
    window = get(f"{name}.attention.sliding_window", None)
    heads, hidden = get(f"{name}.attention.head_count"), get(f"{name}.embedding_length")
    head_dim = get(f"{name}.attention.key_length", hidden // heads)
    for key in (f"{name}.attention.value_length", f"{name}.rope.dimension_count"):
        if (found := get(key, head_dim)) != head_dim:
            raise UnsupportedModel(f"{key}: {found} differs from the head dimension {head_dim}")
    context = get(f"{name}.context_length") if window is None else min(get(f"{name}.context_length"), window)
    return LlamaConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[-1]),
        hidden_size=hidden,
        intermediate_size=get(f"{name}.feed_forward_length"),
        num_layers=get(f"{name}.block_count"),
        num_heads=heads,
        num_kv_heads=get(f"{name}.attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=get(f"{name}.attention.layer_norm_rms_epsilon"),
        rope_theta=get(f"{name}.rope.freq_base", 10000.0),
        max_position=context,
        tie_word_embeddings="output.weight" not in tensors,
        rope_scaling=_rope_scaling(name, get, tensor if _ROPE_FACTORS in tensors else None),
        qkv_bias=name == "qwen2",
    )


def _rope_scaling(name: str, get: Callable[..., Any], tensor: Callable[[str], FloatArray] | None) -> RopeScaling | None:
    kind = get(f"{name}.rope.scaling.type", "none")
    if kind == "linear":
        return RopeScaling("linear", factor=get(f"{name}.rope.scaling.factor"))
    if kind != "none":
        raise UnsupportedModel(f"{name}.rope.scaling.type: {kind!r} is not supported (none and linear are)")
    if tensor is not None:
        return RopeScaling("factors", factors=tuple(tensor(_ROPE_FACTORS).tolist()))
    return None


def _weight_names(config: LlamaConfig) -> dict[str, str]:
    """Hugging Face's name of each weight -> GGUF's."""
    names = {theirs: ours for ours, theirs in _TOP.items()}
    for i in range(config.num_layers):
        for ours, theirs in _LAYER.items():
            names[f"model.layers.{i}.{theirs}.weight"] = f"blk.{i}.{ours}.weight"
        for part in "qkv" if config.qkv_bias else "":
            names[f"model.layers.{i}.self_attn.{part}_proj.bias"] = f"blk.{i}.attn_{part}.bias"
    return names


def _eos_token_ids(get: Callable[..., Any]) -> tuple[int, ...]:
    found = [get(f"tokenizer.ggml.{key}_token_id", None) for key in ("eos", "eot")]
    return tuple(dict.fromkeys(i for i in found if i is not None))
