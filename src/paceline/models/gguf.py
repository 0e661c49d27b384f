# SPDX-License-Identifier: Apache-2.0
"""Llama-architecture models from GGUF files: weights dequantised, tokenizer and chat template from the metadata."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from paceline.models.llama import Llama
from paceline.models.spec import LlamaConfig, LoadedModel, RopeScaling, UnsupportedModel, resolve_dtype
from paceline.models.tokenizer import Tokenizer, byte_level_tokenizer

_REQUIRED = object()

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
_ROPE_FACTORS = "rope_freqs.weight"
_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _File:
    """Metadata and tensors of one GGUF file, read on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = gguf.GGUFReader(path)
        self.tensors = {t.name: t for t in self._reader.tensors}

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if default is _REQUIRED:
            raise UnsupportedModel(f"{self.path}: the metadata has no {key}")
        return default

    def tensor(self, name: str) -> Tensor:
        """A tensor as float32, dequantised where needed."""
        stored = self.tensors.get(name)
        if stored is None:
            raise UnsupportedModel(f"{self.path}: there is no tensor {name}")
        values = gguf.quants.dequantize(stored.data, stored.tensor_type)
        return torch.from_numpy(np.array(values, dtype=np.float32))


def load_gguf(path: Path, dtype: str = "auto", name: str | None = None) -> LoadedModel:
    """Load a GGUF file of architecture ``llama``.

    Raises:
        UnsupportedModel: the architecture, a tensor, the rope scaling or the tokenizer is not supported.
        ValueError: ``dtype`` is not auto, float32 or bfloat16.
    """
    file = _File(path)
    config = read_config(file.get, file.tensors, file.tensor)
    names = _weight_names(config.num_layers)
    unknown = sorted(set(file.tensors) - set(names.values()) - {_ROPE_FACTORS})
    if unknown:
        raise UnsupportedModel(f"{path}: tensors without a place in a Llama model: {', '.join(unknown[:5])}")
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    torch_dtype = resolve_dtype(dtype, _STORED.get(file.tensors["blk.0.attn_q.weight"].tensor_type.name, torch.uint8))

    def get(weight: str) -> Tensor:
        tensor = file.tensor(names[weight])
        kind = weight.split(".")[-2]
        if kind in heads:
            tensor = half_split_rows(tensor, heads[kind])
        return tensor.to(torch_dtype)

    return LoadedModel(
        name=name or path.stem,
        model=Llama(config, torch_dtype, get),
        tokenizer=read_tokenizer(file.get),
        eos_token_ids=_eos_token_ids(file.get),
    )


def half_split_rows(weight: Tensor, heads: int) -> Tensor:
    """Rows of a q or k projection [heads * head_dim, in] from GGUF's rotary order to the half-split one.

    GGUF keeps the two members of a rotary pair in neighbouring rows (x0, y0, x1, y1, ...); here, as in Hugging
    Face, all first members of a head come before all second ones (x0, x1, ..., y0, y1, ...).
    """
    rows, columns = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def read_config(
    get: Callable[..., Any], tensors: dict[str, Any], tensor: Callable[[str], Tensor] | None = None
) -> LlamaConfig:
    """The model's shape from GGUF metadata (``get(key[, default])``) and the names of its tensors."""
    architecture = get("general.architecture")
    if architecture != "llama":
        raise UnsupportedModel(f"general.architecture: {architecture!r} is not supported, only 'llama' is")
    if experts := get("llama.expert_count", 0):
        raise UnsupportedModel(f"llama.expert_count: a mixture of {experts} experts is not supported")
    heads, hidden = get("llama.attention.head_count"), get("llama.embedding_length")
    head_dim = get("llama.attention.key_length", hidden // heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if (found := get(key, head_dim)) != head_dim:
            raise UnsupportedModel(f"{key}: {found} differs from the head dimension {head_dim}")
    context = get("llama.context_length")
    return LlamaConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[-1]),
        hidden_size=hidden,
        intermediate_size=get("llama.feed_forward_length"),
        num_layers=get("llama.block_count"),
        num_heads=heads,
        num_kv_heads=get("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=get("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=get("llama.rope.freq_base", 10000.0),
        max_position=context,
        tie_word_embeddings="output.weight" not in tensors,
        rope_scaling=_rope_scaling(get, tensor if _ROPE_FACTORS in tensors else None),
    )


def _rope_scaling(get: Callable[..., Any], tensor: Callable[[str], Tensor] | None) -> RopeScaling | None:
    kind = get("llama.rope.scaling.type", "none")
    if kind == "linear":
        return RopeScaling("linear", factor=get("llama.rope.scaling.factor"))
    if kind != "none":
        raise UnsupportedModel(f"llama.rope.scaling.type: {kind!r} is not supported (none and linear are)")
    if tensor is not None:
        return RopeScaling("factors", factors=tuple(tensor(_ROPE_FACTORS).tolist()))
    return None


def _weight_names(layers: int) -> dict[str, str]:
    """Hugging Face's name of each weight -> GGUF's."""
    names = {theirs: ours for ours, theirs in _TOP.items()}
    for i in range(layers):
        for ours, theirs in _LAYER.items():
            names[f"model.layers.{i}.{theirs}.weight"] = f"blk.{i}.{ours}.weight"
    return names


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


def _eos_token_ids(get: Callable[..., Any]) -> tuple[int, ...]:
    found = [get(f"tokenizer.ggml.{key}_token_id", None) for key in ("eos", "eot")]
    return tuple(dict.fromkeys(i for i in found if i is not None))
