# SPDX-License-Identifier: Apache-2.0
"""A mixture made of a dense model says what the dense model says, gives every expert work, and is a usual folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from paceline.cli.app import main
from paceline.models.experts import Mixture
from paceline.models.registry import load_model
from paceline.models.upcycle import draw_router, mlp_inputs, usage

IDS = [(7 * i * i + 3) % 256 for i in range(90)]
OTHER_TEXTS = (
    "The capital of France is Paris, and the river that runs through it is called the Seine.",
    "import os\n\nfor name in sorted(os.listdir('.')):\n    print(len(name), name.upper())\n",
    "<|im_start|>user\nHow many legs does a spider have?<|im_end|>\n<|im_start|>assistant\nA spider has eight legs,"
    " two more than an insect.<|im_end|>\n",
    "Once upon a time there was a king who had three daughters, and the youngest of them was afraid of nothing.",
    "1, 2, 3, 5, 8, 13, 21, 34, 55, 89: each number is the sum of the two before it.",
)
Save = Callable[..., tuple[Path, Any]]
Logits = Callable[..., torch.Tensor]


def upcycled(folder: Path, *options: str) -> Path:
    out = folder.parent / "made" / "mixture"
    assert main(["upcycle", str(folder), str(out), *options]) == 0
    return out


@pytest.mark.parametrize(
    ("changes", "options", "experts", "top_k"),
    [
        ({}, (), 4, 2),
        ({"tie_word_embeddings": True}, ("--experts", "8", "--top-k", "3", "--seed", "7"), 8, 3),
        ({"family": "mistral", "sliding_window": None}, ("--top-k", "1"), 4, 1),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            ("--top-k", "4"),
            4,
            4,
        ),
    ],
    ids=["llama", "tied", "mistral", "llama3"],
)
def test_the_mixture_equals_its_parent(
    save: Save, logits: Logits, changes: dict[str, Any], options: tuple[str, ...], experts: int, top_k: int
) -> None:
    folder, reference = save(**changes)
    out = upcycled(folder, *options)
    made = load_model(out)
    config = made.model.config.experts
    assert config is not None
    assert (config.num_experts, config.top_k, made.model.dtype) == (experts, top_k, torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([IDS])).logits[0]
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
        assert type(theirs).__name__ == "MixtralForCausalLM"
        torch.testing.assert_close(theirs(torch.tensor([IDS])).logits[0], expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(logits(made.model, IDS), expected, atol=1e-4, rtol=0)


def test_routers_differ_from_layer_to_layer_and_from_seed_to_seed(save: Save) -> None:
    folder, _ = save()
    found = []
    for seed in ("0", "0", "1"):
        out = upcycled(folder, "--seed", seed)
        layers = load_model(out, "float32").model.layers
        found.append([layer.experts.router for layer in layers if isinstance(layer.experts, Mixture)])
        out.rename(out.with_name(f"kept-{len(found)}"))
    first, again, other = found
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.allclose(a, b) for a, b in zip(first, other, strict=True))
    assert not torch.allclose(first[0], first[1])


def test_the_folder_has_all_that_its_parent_has(save: Save) -> None:
    folder, _ = save()
    out = upcycled(folder, "--dtype", "bfloat16")
    parent, made = load_model(folder), load_model(out)
    assert made.model.dtype == torch.bfloat16
    assert made.eos_token_ids == parent.eos_token_ids
    conversation = [{"role": "user", "content": "Guten Tag"}]
    text = parent.tokenizer.apply_chat_template(conversation)
    assert made.tokenizer.apply_chat_template(conversation) == text
    assert made.tokenizer.encode(text) == parent.tokenizer.encode(text)
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert theirs.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True) == text
    assert theirs(text)["input_ids"] == parent.tokenizer.encode(text)
    assert sorted(path.name for path in out.parent.iterdir()) == ["mixture"]


def test_large_weights_are_sharded(save: Save, logits: Logits, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = save()
    monkeypatch.setattr("paceline.models.upcycle.SHARD_BYTES", 400_000)
    out = upcycled(folder)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 1
    assert {path.name for path in files} == set(index["weight_map"].values())
    parent = load_model(folder, "float32").model
    torch.testing.assert_close(logits(load_model(out).model, IDS), logits(parent, IDS), atol=1e-4, rtol=0)


def test_every_expert_of_a_real_model_gets_work_on_other_texts() -> None:
    loaded = load_model("smollm2", "float32")
    generator = torch.Generator().manual_seed(0)
    from paceline.models.upcycle_text import TEXTS

    with torch.inference_mode():
        seen = mlp_inputs(loaded.model, [loaded.tokenizer.encode(text) for text in TEXTS])
        new = mlp_inputs(loaded.model, [loaded.tokenizer.encode(text) for text in OTHER_TEXTS])
        for drawn_on, inputs in zip(seen, new, strict=True):
            shares = usage(inputs, draw_router(drawn_on, 4, 2, generator), 2)
            assert shares.min() >= 0.05
            torch.testing.assert_close(shares.sum(), torch.tensor(2.0))


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"family": "qwen2", "head_dim": 8}, (), "qkv_bias: a Mixtral has no biases"),
        ({"family": "qwen3"}, (), "qk_norm: a Mixtral has no norms"),
        ({}, ("--experts", "1"), "experts: must be at least 2, got 1"),
        ({}, ("--top-k", "5"), "top-k: must be at least 1 and at most the 4 experts, got 5"),
        ({}, ("--seed", "-1"), "--seed: must be at least 0, got -1"),
        ({}, ("--experts", "2.5"), "must be an integer, got '2.5'"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    save: Save, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], options: tuple[str, ...], message: str
) -> None:
    folder, _ = save(**changes)
    out = folder.parent / "out"
    assert main(["upcycle", str(folder), str(out), *options]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_neither_a_mixture_nor_a_full_folder_is_taken(save: Save, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = save()
    out = upcycled(folder)
    assert main(["upcycle", str(out), str(folder.parent / "twice")]) == 2
    assert "a mixture of 4 experts already" in capsys.readouterr().err
    assert main(["upcycle", str(folder), str(out)]) == 2
    assert "is there already" in capsys.readouterr().err


def test_help_explains_what_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    main(["upcycle", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for part in ("--experts", "--top-k", "--seed", "copy of the layer's MLP", "paceline serve smollm2-moe"):
        assert part in text
