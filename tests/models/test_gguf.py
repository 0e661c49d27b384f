# SPDX-License-Identifier: Apache-2.0
"""GGUF files written from random models of transformers: the same logits, and clear refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel

from paceline.models.gguf import half_split_rows
from paceline.models.registry import load_model
from paceline.models.spec import UnsupportedModel

IDS = [(7 * i * i + 3) % 256 for i in range(90)]
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: the halves of each head's rows are interleaved."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def gguf_name(name: str) -> str:
    fixed = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, kind = name.rsplit(".", 1)
    if stem in fixed:
        return f"{fixed[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def write(
    path: Path,
    model: transformers.LlamaForCausalLM,
    *,
    architecture: str = "llama",
    tokenizer: str = "gpt2",
    pre: str = "gpt-2",
    quantise: bool = False,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    c = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    head_dim = getattr(c, "head_dim", c.hidden_size // c.num_attention_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    alphabet = sorted(ByteLevel.alphabet())
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["<eos>", *alphabet[3:], "th", "the"])
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * 255)
    writer.add_token_merges(["t h", "th e"])
    writer.add_eos_token_id(0)
    for key, value in (metadata or {}).items():
        writer.add_uint32(key, value) if isinstance(value, int) else writer.add_string(key, value)
    for name, tensor in model.state_dict().items():
        data = tensor.numpy()
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = c.num_attention_heads if "q_proj" in name else c.num_key_value_heads
            data = interleaved(data, heads)
        if quantise and data.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), data)
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


Reference = Callable[..., transformers.LlamaForCausalLM]


def test_logits_equal_transformers(tmp_path: Path, reference: Reference, logits: Callable[..., torch.Tensor]) -> None:
    model = reference(rope_parameters={"rope_type": "default", "rope_theta": 777.0})
    loaded = load_model(write(tmp_path / "tiny.gguf", model))
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    assert loaded.eos_token_ids == (0,)
    torch.testing.assert_close(logits(loaded.model, IDS), expected, atol=1e-4, rtol=0)


def test_qwen2_logits_equal_transformers(
    tmp_path: Path, reference: Reference, logits: Callable[..., torch.Tensor]
) -> None:
    """Biases, and q and k rows that its converter leaves in order."""
    model = reference("qwen2", head_dim=8)
    loaded = load_model(write(tmp_path / "tiny.gguf", model, architecture="qwen2", pre="qwen2"))
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits(loaded.model, IDS), expected, atol=1e-4, rtol=0)


def test_rope_factors_are_applied(tmp_path: Path, reference: Reference, logits: Callable[..., torch.Tensor]) -> None:
    """Factors that are all equal are linear scaling, which transformers has by that name."""
    model = reference(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})
    factors = {"rope_freqs.weight": np.full(8, 4.0, dtype=np.float32)}
    loaded = load_model(write(tmp_path / "tiny.gguf", model, tensors=factors))
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits(loaded.model, IDS), expected, atol=1e-4, rtol=0)


def test_quantised_weights_are_dequantised(tmp_path: Path, reference: Reference) -> None:
    model = reference(hidden_size=64, num_attention_heads=4, intermediate_size=96)
    loaded = load_model(write(tmp_path / "tiny.gguf", model, quantise=True), "float32")
    assert loaded.model.dtype == torch.float32
    assert loaded.model.quantization is None
    stored = model.state_dict()["model.layers.1.mlp.down_proj.weight"]
    step = stored.abs().amax() / 127
    assert 0 < (loaded.model.layers[1].down - stored).abs().max() <= step


def test_half_split_rows_undoes_the_converters_order() -> None:
    weight = np.arange(24 * 5, dtype=np.float32).reshape(24, 5)
    assert torch.equal(half_split_rows(torch.from_numpy(interleaved(weight, 3)), 3), torch.from_numpy(weight))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architecture": "gemma"}, "general.architecture: 'gemma'"),
        ({"tokenizer": "llama"}, "tokenizer.ggml.model: 'llama'"),
        ({"pre": "deepseek-llm"}, "tokenizer.ggml.pre: 'deepseek-llm'"),
        ({"metadata": {"llama.expert_count": 8}}, "llama.expert_count"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "llama.rope.scaling.type: 'yarn'"),
        ({"tensors": {"blk.0.attn_q.bias": np.zeros(96, dtype=np.float32)}}, "blk.0.attn_q.bias"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, reference: Reference, changes: dict[str, Any], named: str
) -> None:
    path = write(tmp_path / "tiny.gguf", reference(), **changes)
    with pytest.raises(UnsupportedModel, match=named):
        load_model(path)


@pytest.mark.parametrize("keep", [0, 3, 200, 20_000, -100], ids=str)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, reference: Reference, keep: int) -> None:
    path = write(tmp_path / "tiny.gguf", reference())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UnsupportedModel, match=r"tiny\.gguf"):
        load_model(path)


def test_quantised_weights_become_int8_unless_told_otherwise(
    tmp_path: Path, reference: Reference, logits: Callable[..., torch.Tensor]
) -> None:
    model = reference(hidden_size=64, num_attention_heads=4, intermediate_size=96)
    path = write(tmp_path / "tiny.gguf", model, quantise=True)
    exact = logits(load_model(path, quantization="none").model, IDS)
    for options in ({}, {"quantization": "int8"}):
        loaded = load_model(path, **options).model
        assert (loaded.quantization, loaded.dtype) == ("int8", torch.bfloat16)
        assert 0 < (logits(loaded, IDS) - exact).std() / exact.std() < 0.15
    for options in ({"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "none"}):
        assert load_model(path, **options).model.quantization is None


@pytest.mark.parametrize("options", [{"quantization": "int4"}, {"quantization": "int8", "dtype": "float32"}])
def test_a_quantization_that_cannot_be_honoured_is_refused(
    tmp_path: Path, reference: Reference, options: dict[str, str]
) -> None:
    with pytest.raises(ValueError, match="quantization"):
        load_model(write(tmp_path / "tiny.gguf", reference()), **options)
