# SPDX-License-Identifier: Apache-2.0
"""Folders as `save_pretrained` writes them: the same logits as transformers, and clear refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from paceline.models.llama import Llama
from paceline.models.registry import load_model
from paceline.models.spec import UnsupportedModel

Save = Callable[..., tuple[Path, transformers.LlamaForCausalLM]]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
IDS = [(7 * i * i + 3) % 256 for i in range(90)]


def edit(folder: Path, file: str = "config.json", **changes: Any) -> None:
    path = folder / file
    raw = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(raw | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 6},
        {"num_key_value_heads": 1, "head_dim": 32},
        {"rope_parameters": LLAMA3},
        {"rope_parameters": LINEAR},
        {"shard_size": "60KB"},
        {"family": "mistral", "sliding_window": None},
        {"family": "qwen2", "head_dim": 8},
        {"family": "qwen3"},
        {"family": "qwen3", "tie_word_embeddings": True, "head_dim": 32},
    ],
    ids=[
        "untied",
        "tied",
        "no-gqa",
        "head-dim",
        "llama3",
        "linear",
        "sharded",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen3-tied",
    ],
)
def test_logits_equal_transformers(save: Save, logits: Callable[..., torch.Tensor], changes: dict[str, Any]) -> None:
    folder, reference = save(**changes)
    assert (folder / "model.safetensors.index.json").exists() == ("shard_size" in changes)
    loaded = load_model(folder, "float32")
    with torch.inference_mode():
        expected = reference(torch.tensor([IDS])).logits[0]
    assert expected.std() > 0.5  # flat logits would agree with anything
    torch.testing.assert_close(logits(loaded.model, IDS), expected, atol=1e-4, rtol=0)


def test_one_token_gives_the_same_logits_as_the_first_of_many(save: Save, logits: Callable[..., torch.Tensor]) -> None:
    model = load_model(save()[0], "float32").model
    torch.testing.assert_close(logits(model, IDS[:1])[0], logits(model, IDS)[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("stored", "wanted", "got"),
    [
        (torch.float32, "auto", torch.float32),
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float16, "auto", torch.bfloat16),
        (torch.bfloat16, "float32", torch.float32),
    ],
)
def test_dtype(
    save: Save, logits: Callable[..., torch.Tensor], stored: torch.dtype, wanted: str, got: torch.dtype
) -> None:
    folder, reference = save()
    path = folder / "model.safetensors"
    save_file({name: tensor.to(stored) for name, tensor in load_file(path).items()}, path)
    model = load_model(folder, wanted).model
    assert (model.dtype, model.quantization) == (got, None)
    with torch.inference_mode():
        expected = reference(torch.tensor([IDS])).logits[0]
    assert (logits(model, IDS) - expected).std() / expected.std() < 0.05


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(("options", "off"), [({"dtype": "bfloat16"}, 0.06), ({"quantization": "int8"}, 0.15)])
def test_the_fused_path_is_close_to_transformers(
    save: Save, logits: Callable[..., torch.Tensor], family: str, options: dict[str, str], off: float
) -> None:
    folder, reference = save(family=family, head_dim=8)
    with torch.inference_mode():
        expected = reference(torch.tensor([IDS])).logits[0]
    got = logits(load_model(folder, **options).model, IDS)
    assert 0 < (got - expected).std() / expected.std() < off


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_greedy_tokens_equal_transformers(save: Save, logits: Callable[..., torch.Tensor], family: str) -> None:
    folder, reference = save(family=family, head_dim=8)
    model = load_model(folder, "float32").model
    ids = IDS[:20]
    for _ in range(16):
        ids = [*ids, int(logits(model, ids)[-1].argmax())]
    expected = reference.generate(torch.tensor([IDS[:20]]), max_new_tokens=16, do_sample=False, eos_token_id=None)
    assert ids == expected[0].tolist()


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({"family": "mistral", "sliding_window": 48}, 48),
        ({"family": "mistral", "sliding_window": 4096}, 512),
        ({"family": "qwen2", "head_dim": 8, "sliding_window": 48}, 512),
        ({"family": "qwen2", "head_dim": 8, "sliding_window": 48, "use_sliding_window": True}, 48),
    ],
)
def test_a_sliding_window_bounds_the_context(
    save: Save, logits: Callable[..., torch.Tensor], changes: dict[str, Any], context: int
) -> None:
    """Up to its length, attention with a window is plain attention; beyond it, requests are refused."""
    folder, reference = save(**changes)
    model = load_model(folder, "float32").model
    assert model.config.max_position == context
    ids = IDS[: min(context, len(IDS))]
    with torch.inference_mode():
        torch.testing.assert_close(logits(model, ids), reference(torch.tensor([ids])).logits[0], atol=1e-4, rtol=0)


def test_unknown_dtype_is_refused(save: Save) -> None:
    with pytest.raises(ValueError, match="dtype: must be auto"):
        load_model(save()[0], "float64")


def test_older_rope_keys_are_read(save: Save, logits: Callable[..., torch.Tensor]) -> None:
    folder, reference = save(rope_parameters=LINEAR)
    edit(folder, rope_parameters=None, rope_theta=5000.0, rope_scaling={"type": "linear", "factor": 4.0})
    with torch.inference_mode():
        expected = reference(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits(load_model(folder).model, IDS), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["PhimoeForCausalLM"], "model_type": "phimoe"}, "PhimoeForCausalLM"),
        ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, "num_local_experts: must be an integer"),
        ({"model_type": "qwen2"}, "qwen2"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config: 'awq'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type: 'yarn'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"num_key_value_heads": 4}, "num_key_value_heads = 4"),
        ({"hidden_size": 32}, "model.embed_tokens.weight"),
        ({"num_hidden_layers": 2}, r"model\.layers\.2\."),
        ({"num_hidden_layers": 4}, r"the weights lack model\.layers\.3\."),
    ],
)
def test_what_is_not_supported_is_refused_by_name(save: Save, changes: dict[str, Any], named: str) -> None:
    folder, _ = save()
    edit(folder, **changes)
    with pytest.raises(UnsupportedModel, match=named):
        load_model(folder)


@pytest.mark.parametrize("file", ["tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(save: Save, file: str) -> None:
    folder, _ = save()
    (folder / file).unlink()
    with pytest.raises(UnsupportedModel, match=file):
        load_model(folder)


def test_eos_ids_come_from_tokenizer_generation_and_model_configuration(save: Save) -> None:
    folder, _ = save()
    edit(folder, "generation_config.json", eos_token_id=[9, 0])
    edit(folder, eos_token_id=[9, 11])
    assert load_model(folder).eos_token_ids == (0, 9, 11)


def test_chat_template_is_rendered_with_the_special_tokens(save: Save) -> None:
    folder, _ = save()
    tokenizer = load_model(folder).tokenizer
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages) == "<user>hi<eos><assistant>"
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    assert load_model(folder).tokenizer.apply_chat_template(messages) == "hi!"


def test_model_weights_are_those_of_the_file(save: Save) -> None:
    folder, reference = save()
    model = load_model(folder).model
    assert isinstance(model, Llama)
    assert torch.equal(model.head, reference.lm_head.weight)
