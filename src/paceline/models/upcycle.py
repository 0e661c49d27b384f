# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts from a dense model: its MLP copied into every expert, in front of them a router drawn at random.

Mixtral scales the weights of the chosen experts to the sum 1, so equal experts add up to the MLP that they were copied
from: the mixture says what its parent says, whichever experts are chosen (Komatsuzaki et al., "Sparse Upcycling",
2022, begins its training from such a model).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from paceline.models.experts import gated_mlp
from paceline.models.huggingface import save_json, save_tokenizer, shape_fields
from paceline.models.llama import Llama, LlamaLayer, project
from paceline.models.spec import LlamaConfig, LoadedModel, RopeScaling, UnsupportedModel
from paceline.models.upcycle_text import TEXTS

SHARD_BYTES = 1 << 30
"""Weights of more than this are written as several files."""

LEAST_SHARE = 0.05
"""The part of all tokens that every expert of every layer shall get, if a quarter of a fair share is not less."""

DRAWS = 50
"""Routers drawn for a layer before giving up."""

Progress = Callable[[int, int], None]
"""Called with (layers done, layers in all)."""


@dataclass(frozen=True, slots=True)
class Upcycled:
    """What was written: bytes of weights, and the part of the tokens that the least and the most used expert gets."""

    weight_bytes: int
    least_share: float
    most_share: float


def upcycle(
    loaded: LoadedModel,
    folder: Path,
    *,
    experts: int,
    top_k: int,
    seed: int,
    dtype: torch.dtype,
    progress: Progress,
) -> Upcycled:
    """Write the Mixtral model made of ``loaded``, which is dense and in float32, to ``folder``.

    The folder appears when it is complete.

    Raises:
        UnsupportedModel: the model cannot be a Mixtral, or no router gives every expert work.
        FileExistsError: ``folder`` is there and not empty.
        OSError: it cannot be written.
    """
    model, config = loaded.model, loaded.model.config
    refuse(config)
    check_experts(experts, top_k)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is there already; give another folder")
    # Refused before anything is computed, if it is to be.
    described = config_json(config, loaded, experts, top_k, dtype)
    sizes = _weight_bytes(config, experts, dtype.itemsize)
    total = sum(sizes)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder.parent).free) < total:
        raise OSError(f"{folder}: {total / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        states = mlp_inputs(model, [loaded.tokenizer.encode(text) for text in TEXTS])
        routers = [draw_router(inputs, experts, top_k, generator) for inputs in states]
        shares = torch.stack([usage(x, router, top_k) for x, router in zip(states, routers, strict=True)])
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        _write_about(partial, loaded, described)
        _write_weights(partial, model, routers, dtype, _shards(sizes), progress)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Upcycled(total, float(shares.min()), float(shares.max()))


def refuse(config: LlamaConfig) -> None:
    """Raise `UnsupportedModel`, by name, for what a Mixtral model cannot be."""
    if config.experts is not None:
        raise UnsupportedModel(f"the model is a mixture of {config.experts.num_experts} experts already")
    if config.qkv_bias:
        raise UnsupportedModel("qkv_bias: a Mixtral has no biases; take a Llama or Mistral model")
    if config.qk_norm:
        raise UnsupportedModel("qk_norm: a Mixtral has no norms of queries and keys; take a Llama or Mistral model")
    if config.rope_scaling is not None and config.rope_scaling.kind == "factors":
        raise UnsupportedModel("rope_scaling: factors of single frequencies have no place in config.json")


def check_experts(experts: int, top_k: int) -> None:
    """Raise `ValueError` for numbers that make no mixture."""
    if experts < 2:
        raise ValueError(f"experts: must be at least 2, got {experts}")
    if not 1 <= top_k <= experts:
        raise ValueError(f"top-k: must be at least 1 and at most the {experts} experts, got {top_k}")


class _Recorder:
    """Stands for the MLP of a layer, and keeps what it was given."""

    def __init__(self, layer: LlamaLayer, inputs: list[Tensor]) -> None:
        self._layer = layer
        self._inputs = inputs

    def __call__(self, hidden: Tensor) -> Tensor:
        self._inputs.append(hidden)
        return gated_mlp(hidden, self._layer.gate_up, self._layer.down, project)


def mlp_inputs(model: Llama, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """What each layer's MLP is given on ``sequences`` of token ids: [tokens, hidden_size] by layer."""
    kept = model.layers
    inputs: list[list[Tensor]] = [[] for _ in kept]
    try:
        model.layers = [
            replace(layer, experts=_Recorder(layer, into)) for layer, into in zip(kept, inputs, strict=True)
        ]
        for ids in sequences:
            model.forward(torch.tensor(ids), torch.arange(len(ids)), _attend)
    finally:
        model.layers = kept
    return [torch.cat(found) for found in inputs]


def _attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention within one whole sequence; see `paceline.models.llama.Attend`."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


def draw_router(inputs: Tensor, experts: int, top_k: int, generator: torch.Generator) -> Tensor:
    """A router [experts, hidden_size] under which ``inputs`` [tokens, hidden_size] give every expert enough work.

    Rows are normal, made orthogonal to the mean input: what all tokens have in common, which is much, would otherwise
    send them all to the same experts. They are scaled so that an expert's logit has a standard deviation of 1.

    Raises:
        UnsupportedModel: no such router was among `DRAWS` of them.
    """
    mean = inputs.mean(0)
    least = min(LEAST_SHARE, top_k / experts / 4)
    for _ in range(DRAWS):
        router = torch.randn(experts, inputs.shape[1], generator=generator)
        router -= torch.outer(router @ mean / mean.dot(mean), mean)
        router /= (inputs @ router.T).std(0, keepdim=True).T
        # A margin, since other texts differ.
        if bool((usage(inputs, router, top_k) >= 2 * least).all()):
            return router
    raise UnsupportedModel(
        f"none of {DRAWS} random routers gives each of {experts} experts {2 * least:.1%} of the tokens; ask for fewer"
    )


def usage(inputs: Tensor, router: Tensor, top_k: int) -> Tensor:
    """The part of the tokens that each expert gets, [experts]; they add up to top_k."""
    chosen = (inputs @ router.T).topk(top_k, -1).indices
    return torch.bincount(chosen.flatten(), minlength=len(router)) / len(inputs)


def config_json(
    config: LlamaConfig, loaded: LoadedModel, experts: int, top_k: int, dtype: torch.dtype
) -> dict[str, Any]:
    """``config.json`` of the mixture."""
    tokenizer = loaded.tokenizer
    bos = None if tokenizer.bos_token is None else tokenizer.backend.token_to_id(tokenizer.bos_token)
    ids = {"bos_token_id": bos, "eos_token_id": _one_or_all(loaded.eos_token_ids)}
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **shape_fields(config),
        "rope_parameters": {"rope_theta": config.rope_theta, **_rope(config.rope_scaling)},
        "sliding_window": None,
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        **{key: value for key, value in ids.items() if value is not None},
        "dtype": str(dtype).removeprefix("torch."),
    }


def _rope(scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": scaling.kind,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }


def _one_or_all(ids: tuple[int, ...]) -> int | list[int] | None:
    return ids[0] if len(ids) == 1 else list(ids) or None


def _write_about(folder: Path, loaded: LoadedModel, described: dict[str, Any]) -> None:
    """Everything but the weights."""
    save_tokenizer(loaded.tokenizer, folder, loaded.model.config.max_position)
    save_json(described, folder / "config.json")
    generation = {key: value for key, value in described.items() if key in ("bos_token_id", "eos_token_id")}
    save_json(generation, folder / "generation_config.json")


def _layer_weights(config: LlamaConfig, layer: LlamaLayer, index: int, router: Tensor) -> Iterator[tuple[str, Tensor]]:
    """One layer's weights under Mixtral's names."""
    prefix = f"model.layers.{index}."
    kv = config.num_kv_heads * config.head_dim
    yield prefix + "input_layernorm.weight", layer.attn_norm
    yield prefix + "post_attention_layernorm.weight", layer.mlp_norm
    for part, weight in zip("qkv", layer.qkv.split([config.num_heads * config.head_dim, kv, kv]), strict=True):
        yield f"{prefix}self_attn.{part}_proj.weight", weight
    yield prefix + "self_attn.o_proj.weight", layer.o
    yield prefix + "block_sparse_moe.gate.weight", router
    gate, up = layer.gate_up.chunk(2)
    for expert in range(len(router)):
        for part, weight in (("w1", gate), ("w2", layer.down), ("w3", up)):
            yield f"{prefix}block_sparse_moe.experts.{expert}.{part}.weight", weight


def _weight_bytes(config: LlamaConfig, experts: int, item: int) -> list[int]:
    """Bytes of each layer, and at the end of what belongs to no layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    attention = 2 * hidden * config.head_dim * (config.num_heads + config.num_kv_heads)
    layer = attention + 2 * hidden + experts * (3 * inner * hidden + hidden)
    rest = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2) + hidden
    return [layer * item] * config.num_layers + [rest * item]


def _shards(sizes: Sequence[int]) -> list[list[int]]:
    """Indices of ``sizes`` in runs of at most `SHARD_BYTES`, or of one."""
    runs: list[list[int]] = []
    left = -1
    for i, size in enumerate(sizes):
        if size > left:
            runs.append([])
            left = max(SHARD_BYTES, size)
        runs[-1].append(i)
        left -= size
    return runs


def _write_weights(
    folder: Path,
    model: Llama,
    routers: Sequence[Tensor],
    dtype: torch.dtype,
    shards: list[list[int]],
    progress: Progress,
) -> None:
    """The weights, a shard at a time, and their index if there are several."""
    config, done, total = model.config, 0, 0
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors: dict[str, Tensor] = {}
        for i in shard:
            if i < config.num_layers:
                found = dict(_layer_weights(config, model.layers[i], i, routers[i]))
            else:
                found = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.final_norm}
                if isinstance(model.head, Tensor) and not config.tie_word_embeddings:
                    found["lm_head.weight"] = model.head
            # A file may not name the same memory twice.
            tensors |= {key: weight.to(dtype, copy=True).contiguous() for key, weight in found.items()}
            done += 1
            progress(done, config.num_layers + 1)
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
