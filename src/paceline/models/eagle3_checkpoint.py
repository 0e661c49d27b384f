# SPDX-License-Identifier: Apache-2.0
"""Published EAGLE-3 checkpoints: config.json, and weights named as by the authors or by the speculators library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from paceline.models.eagle3 import Eagle3, Eagle3Config, default_taps
from paceline.models.experts import ExpertExchange
from paceline.models.huggingface import Shards, read_config, read_json
from paceline.models.llama import GetTensor, Llama
from paceline.models.spec import ExpertConfig, LlamaConfig, UnsupportedModel

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator")
"""What ``architectures`` says: the authors', vLLM's and the speculators library's names for the same network."""

_PICKLED = "pytorch_model.bin"
_TAPS = "eagle_aux_hidden_state_layer_ids"
_PLAIN = {
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "logit_scale": 1.0,
    "num_hidden_layers": 1,
    "parallel_drafting": False,
}
"""Keys that change the network, each with the only value that is supported."""


def load_eagle3(folder: Path, target: Llama, *, parallel: ExpertExchange | None = None) -> Eagle3:
    """Load the draft model in ``folder`` for ``target``, to run in the target's arithmetic.

    Positions are not limited: rotary embeddings have no last one, and beyond the context that a head was trained for
    only fewer drafts are accepted. vLLM runs it on as well.

    Args:
        folder: a checkpoint.
        target: float32, bfloat16 or int8, which go for the head too, however its weights are stored.
        parallel: what the head's experts, if it has any, are shared through; None: this rank has all of them.

    Raises:
        UnsupportedModel: a file or weight is missing, or the checkpoint needs what this engine lacks.
    """
    if not (folder / "config.json").is_file():
        raise UnsupportedModel(
            f"draft model {str(folder)!r}: not a folder with a config.json; models are not downloaded"
        )
    shape = read_eagle3_config(read_json(folder / "config.json"), target.config)
    names, get = _weights(folder)
    _refuse_unused(names, shape.decoder.experts)
    int8 = target.quantization == "int8"
    taken = torch.float32 if int8 else target.dtype

    def in_dtype(name: str) -> Tensor:
        tensor = get(name).to(target.device)
        return tensor.to(taken) if tensor.is_floating_point() else tensor

    return Eagle3(shape, target, in_dtype, names, target.dtype, int8=int8, exchange=parallel)


def read_eagle3_config(raw: dict[str, Any], target: LlamaConfig) -> Eagle3Config:
    """The draft model's shape from ``config.json``, or from the form that the speculators library writes.

    Raises:
        UnsupportedModel: an architecture or feature that is not supported, by name.
    """
    residual = False
    if (kind := raw.get("speculators_model_type")) is not None:
        if kind != "eagle3":
            raise UnsupportedModel(f"speculators_model_type: {kind!r} is not supported, only 'eagle3' is")
        layer = raw.get("transformer_layer_config") or {}
        raw = {**layer, **raw, "model_type": layer.get("model_type", "llama")}
        residual = True
    raw = {**raw, **(raw.get("eagle_config") or {})}
    architecture = (raw.get("architectures") or [ARCHITECTURES[0]])[0]
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(f"architectures: {architecture} is not supported, only {', '.join(ARCHITECTURES)} are")
    for key, plain in (_PLAIN | {"use_aux_hidden_state": True}).items():
        if (found := raw.get(key, plain)) not in (plain, None):
            raise UnsupportedModel(f"{key}: {found!r} is not supported, only {plain!r} is")
    if raw.get("sliding_window") is not None and raw.get("use_sliding_window", True):
        raise UnsupportedModel(f"sliding_window: {raw['sliding_window']} is not supported in a draft model")
    defaults = {"num_hidden_layers": 1, "max_position_embeddings": target.max_position}
    try:
        decoder = read_config(defaults | raw | {"architectures": ["LlamaForCausalLM"], "sliding_window": None})
    except KeyError as error:
        raise UnsupportedModel(f"config.json: {error.args[0]} is missing") from None
    taps = raw.get(_TAPS)
    return Eagle3Config(
        decoder=replace(decoder, max_position=max(decoder.max_position, target.max_position), experts=_experts(raw)),
        draft_vocab_size=raw.get("draft_vocab_size") or decoder.vocab_size,
        target_hidden_size=raw.get("target_hidden_size") or decoder.hidden_size,
        taps=tuple(taps) if taps else default_taps(target.num_layers),
        norm_before_residual=bool(raw.get("norm_before_residual", residual)),
    )


def _experts(raw: Mapping[str, Any]) -> ExpertConfig | None:
    """The mixture that the layer has in place of its MLP, in the keys of Qwen's mixtures."""
    if not raw.get("num_experts"):
        return None
    for key in ("num_experts_per_tok", "moe_intermediate_size"):
        if key not in raw:
            raise UnsupportedModel(f"{key}: is needed beside num_experts")
    return ExpertConfig(
        num_experts=raw["num_experts"],
        top_k=raw["num_experts_per_tok"],
        intermediate_size=raw["moe_intermediate_size"],
        normalise=raw.get("norm_topk_prob", False),
    )


def _weights(folder: Path) -> tuple[set[str], GetTensor]:
    """Names of the weights, the layer's beginning with ``midlayer.``, and how each is read."""
    source: GetTensor
    if (folder / _PICKLED).exists() and not list(folder.glob("*.safetensors")):
        try:
            stored: dict[str, Tensor] = torch.load(folder / _PICKLED, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, UnpicklingError) as error:
            raise UnsupportedModel(f"{folder / _PICKLED}: cannot be read: {error}") from error
        found = {_plain_name(name): name for name in stored}
        source = stored.__getitem__
    else:
        shards = Shards(folder)
        found = {_plain_name(name): name for name in shards.names}
        source = shards.get

    def get(name: str) -> Tensor:
        if name not in found:
            raise UnsupportedModel(f"the weights lack {name}")
        return source(found[name])

    return set(found), get


def _plain_name(name: str) -> str:
    """The authors' name of a weight."""
    return re.sub(r"^layers\.0\.", "midlayer.", name.removeprefix("model."))


def _refuse_unused(names: set[str], experts: ExpertConfig | None) -> None:
    """A weight that nothing would read means that the model is not the one its configuration describes."""
    layer = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    layer += [f"self_attn.{p}_proj" for p in "qkvo"]
    mlps = ["mlp."] if experts is None else [f"mlp.experts.{e}." for e in range(experts.num_experts)]
    layer += [f"{mlp}{p}_proj" for mlp in mlps for p in ("gate", "up", "down")]
    layer += [] if experts is None else ["mlp.gate"]
    # t2d is the inverse of d2t, and not needed.
    known = {"fc.weight", "norm.weight", "lm_head.weight", "embed_tokens.weight", "d2t", "t2d"}
    known |= {f"midlayer.{part}.weight" for part in layer}
    unused = sorted(name for name in names - known if not name.endswith("rotary_emb.inv_freq"))
    if unused:
        raise UnsupportedModel(f"weights without a place in an EAGLE-3 model: {', '.join(unused[:5])}")
