# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as they are published: the forms that load, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.graphs import NONE
from paceline.core.lockstep import RUN, Agreement
from paceline.core.plan import StepPlan
from paceline.models.eagle3 import default_taps
from paceline.models.eagle3_checkpoint import load_eagle3
from paceline.models.llama import Llama
from paceline.models.registry import load_model
from paceline.models.spec import UnsupportedModel
from tests.eagle3.heads import DRAFTED, LAYERS, PROMPTS, SHARED, VOCABULARY, Engine, Reference, save_head, save_target
from tests.eagle3.test_drafter import check_drafts

Weights = dict[str, Tensor]
Change = Callable[[dict[str, Any], Weights], None]


def changed(folder: Path, change: Change) -> Path:
    """The checkpoint in ``folder``, changed in place."""
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, weights)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def folder(target_folder: Path, tmp_path: Path) -> Path:
    return save_head(target_folder, tmp_path / "head")


def drafts(target: Llama, folder: Path) -> list[tuple[int, ...]]:
    engine = Engine(target, load_eagle3(folder, target))
    engine.complete(PROMPTS, max_tokens=8)
    return [drafted for _, drafted in engine.executor.drafted]


def test_the_form_of_the_speculators_library(target: Llama, target_folder: Path, folder: Path) -> None:
    """The same network, its layer named layers.0 and described by a part of the configuration."""

    def rewrite(config: dict[str, Any], weights: Weights) -> None:
        layer = dict(config)
        config.clear()
        taps = layer.pop("eagle_aux_hidden_state_layer_ids")
        config |= {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3"}
        config |= {"draft_vocab_size": layer.pop("draft_vocab_size"), "norm_before_residual": False}
        config |= {"eagle_aux_hidden_state_layer_ids": taps, "transformer_layer_config": layer}
        for name in [name for name in weights if name.startswith("midlayer.")]:
            weights[name.replace("midlayer.", "layers.0.")] = weights.pop(name)

    expected = drafts(target, folder)
    assert drafts(target, changed(folder, rewrite)) == expected


def test_pickled_weights(target: Llama, folder: Path) -> None:
    expected = drafts(target, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02not a checkpoint")
    with pytest.raises(UnsupportedModel, match=r"pytorch_model\.bin: cannot be read"):
        load_eagle3(folder, target)
    torch.save(weights, folder / "pytorch_model.bin")
    assert drafts(target, folder) == expected


def keep(config: dict[str, Any], weights: Weights) -> None:
    pass


def own_embedding(config: dict[str, Any], weights: Weights) -> None:
    weights["embed_tokens.weight"] = torch.randn(VOCABULARY, 32, generator=torch.Generator().manual_seed(3))


def normed_residual(config: dict[str, Any], weights: Weights) -> None:
    config["norm_before_residual"] = True


def other_taps(config: dict[str, Any], weights: Weights) -> None:
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 6, 7]}
    del config["eagle_aux_hidden_state_layer_ids"]
    weights["fc.weight"] = weights["fc.weight"].repeat(1, 2)[:, : 4 * 32].contiguous()


def usual_taps(config: dict[str, Any], weights: Weights) -> None:
    del config["eagle_aux_hidden_state_layer_ids"]


@pytest.mark.parametrize("change", [keep, own_embedding, normed_residual, other_taps, usual_taps])
def test_variants_draft_as_the_reference_does(target: Llama, target_folder: Path, folder: Path, change: Change) -> None:
    before = drafts(target, folder)
    changed(folder, change)
    config = json.loads((folder / "config.json").read_text())
    engine = Engine(target, load_eagle3(folder, target), max_num_batched_tokens=20)
    engine.complete([*PROMPTS, *SHARED])
    reference = Reference(target_folder, folder)
    reference.config.setdefault(
        "eagle_aux_hidden_state_layer_ids",
        config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", [2, LAYERS // 2, LAYERS - 3]),
    )
    assert check_drafts(engine, reference) > 200
    assert (drafts(target, folder) == before) == (change in (keep, usual_taps))


def test_a_head_with_the_whole_vocabulary_may_end_as_the_target_does(
    target: Llama, target_folder: Path, tmp_path: Path
) -> None:
    whole = save_head(target_folder, tmp_path / "whole", draft_vocab_size=VOCABULARY)
    stored = load_file(target_folder / "model.safetensors")

    def as_target(config: dict[str, Any], weights: Weights) -> None:
        weights["lm_head.weight"] = stored["lm_head.weight"].float()

    def without(config: dict[str, Any], weights: Weights) -> None:
        del weights["lm_head.weight"]

    assert drafts(target, changed(whole, as_target)) == drafts(target, changed(whole, without))
    assert "d2t" not in load_file(whole / "model.safetensors")


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize(("dtype", "quantization"), [("bfloat16", None), ("auto", "int8")])
def test_the_arithmetic_of_the_target(
    target_folder: Path, tmp_path: Path, dtype: str, quantization: str | None, experts: int
) -> None:
    """Rounding changes few of the drafts: the head is given the states of the right layers and positions."""
    folder = save_head(target_folder, tmp_path / "head", experts=experts)
    target = load_model(target_folder, dtype, quantization).model
    head = load_eagle3(folder, target)
    assert (head.dtype, head.quantization) == (torch.bfloat16, quantization)
    engine = Engine(target, head, max_num_batched_tokens=40)
    engine.complete([*PROMPTS, *SHARED])
    reference = Reference(target_folder, folder)
    pairs = [
        (token, drafted[0]) for tokens, drafted in engine.executor.drafted for token, _ in reference.drafts(tokens)[:1]
    ]
    assert sum(token == drafted for token, drafted in pairs) > 0.7 * len(pairs)
    # A rank without rows passes through it without a token.
    engine.executor.launch(StepPlan(0, (), 0, 0), Agreement(0, RUN, NONE, 0, (3,), 3, False))
    assert engine.executor.collect().next_drafts == ()


def test_positions_beyond_the_context_of_a_head(target: Llama, target_folder: Path, folder: Path) -> None:
    def shorten(config: dict[str, Any], weights: Weights) -> None:
        config["max_position_embeddings"] = 16

    head = load_eagle3(changed(folder, shorten), target)
    engine = Engine(target, head)
    engine.complete([*PROMPTS, *SHARED])
    assert check_drafts(engine, Reference(target_folder, folder)) > 200


def setting(**values: Any) -> Change:
    return lambda config, weights: config.update(values)


def without(name: str) -> Change:
    def change(config: dict[str, Any], weights: Weights) -> None:
        del weights[name]

    return change


def with_weight(name: str, tensor: Tensor) -> Change:
    def change(config: dict[str, Any], weights: Weights) -> None:
        weights[name] = tensor

    return change


def lacking(key: str) -> Change:
    return lambda config, weights: config.pop(key)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (setting(architectures=["MedusaModel"]), r"architectures: MedusaModel is not supported"),
        (setting(speculators_model_type="peagle"), r"speculators_model_type: 'peagle' is not supported"),
        (setting(model_type="qwen3"), r"model_type 'qwen3'"),
        (setting(num_hidden_layers=2), r"num_hidden_layers: 2 is not supported, only 1 is"),
        (setting(norm_before_fc=True), r"norm_before_fc: True is not supported"),
        (setting(fc_norm=True), r"fc_norm: True is not supported"),
        (setting(norm_output=True), r"norm_output: True is not supported"),
        (setting(parallel_drafting=True), r"parallel_drafting: True is not supported"),
        (setting(eagle_config={"use_aux_hidden_state": False}), r"use_aux_hidden_state: False is not supported"),
        (setting(attention_bias=True), r"attention_bias: True is not supported"),
        (setting(sliding_window=64), r"sliding_window: 64 is not supported"),
        (setting(quantization_config={"quant_method": "fp8"}), r"quantization_config: 'fp8'"),
        (setting(eagle_aux_hidden_state_layer_ids=[5, 2, 4]), r"eagle_aux_hidden_state_layer_ids: \[5, 2, 4\]"),
        (setting(num_experts=4), r"num_experts_per_tok: is needed beside num_experts"),
        (setting(hidden_size=64), r"weight: the configuration asks for shape \(64, "),
        (lacking("num_attention_heads"), r"config\.json: num_attention_heads is missing"),
        (without("fc.weight"), r"the weights lack fc\.weight"),
        (without("lm_head.weight"), r"lm_head\.weight: is missing"),
        (without("d2t"), r"the weights lack d2t"),
        (without("midlayer.hidden_norm.weight"), r"the weights lack midlayer\.hidden_norm\.weight"),
        (with_weight("mask_hidden", torch.ones(3)), r"without a place in an EAGLE-3 model: mask_hidden"),
        (with_weight("d2t", torch.full((DRAFTED,), VOCABULARY - DRAFTED + 1)), r"d2t: leads to ids outside"),
        (with_weight("d2t", torch.full((DRAFTED,), -1)), r"d2t: leads to ids outside"),
        (with_weight("d2t", torch.zeros(3)), rf"d2t: the configuration asks for shape \({DRAFTED},\)"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(target: Llama, folder: Path, change: Change, says: str) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        load_eagle3(changed(folder, change), target)


def test_a_folder_without_a_model(target: Llama, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="not a folder with a config"):
        load_eagle3(tmp_path / "nothing", target)


def test_a_small_target_needs_its_layers_named(tmp_path: Path) -> None:
    """The usual three do not exist in it; a random head names what there is."""
    assert default_taps(32) == (2, 16, 29)
    small = save_target(tmp_path / "small", num_hidden_layers=2)
    target = load_model(small, "float32").model
    head = save_head(small, tmp_path / "head")
    assert len(drafts(target, head)) > 20
    with pytest.raises(UnsupportedModel, match=r"must be given for a target of 2 layers"):
        load_eagle3(changed(head, lacking("eagle_aux_hidden_state_layer_ids")), target)


def test_random_heads_repeat_by_seed(target_folder: Path, tmp_path: Path) -> None:
    first, again, other = (
        load_file(save_head(target_folder, tmp_path / name, seed=seed) / "model.safetensors")
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    ids = torch.arange(DRAFTED) + first["d2t"]
    assert torch.equal(first["t2d"].nonzero().flatten(), ids)
    for wrong, says in (
        ({"draft_vocab_size": VOCABULARY + 1}, "draft_vocab_size: must be 1 to 256"),
        ({"experts": 2, "top_k": 3}, "top_k: must be 1 to 2"),
    ):
        with pytest.raises(ValueError, match=says):
            save_head(target_folder, tmp_path / "d", **wrong)
