# SPDX-License-Identifier: Apache-2.0
"""Write a GGUF model as a Hugging Face folder in bfloat16, for servers that read no GGUF.

    python tools/peers/export_model.py MODEL.gguf FOLDER

Runs in paceline's own environment: weights and tokenizer are read by its loader.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.models.gguf import GGUFWeights
from paceline.models.gguf_file import GGUFFile
from paceline.models.gguf_tokenizer import read_tokenizer
from paceline.models.spec import LlamaConfig


def config_json(config: LlamaConfig, eos_token_id: int | None) -> dict[str, Any]:
    """``config.json`` of a plain Llama model.

    Raises:
        ValueError: the model is more than that.
    """
    if config.rope_scaling is not None or config.qkv_bias or config.qk_norm:
        raise ValueError("only plain Llama models can be written: no rope scaling, no biases, no norms of q and k")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": "silu",
        "eos_token_id": eos_token_id,
        "torch_dtype": "bfloat16",
    }


def export(source: Path, folder: Path) -> None:
    """Write ``source`` to ``folder``, the weights last: a folder with weights is complete."""
    file = GGUFFile(source)
    weights = GGUFWeights(file)
    tokenizer = read_tokenizer(file.get)
    folder.mkdir(parents=True, exist_ok=True)
    config = config_json(weights.config, file.get("tokenizer.ggml.eos_token_id", None))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "chat_template": tokenizer.chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2))
    tensors = {name: weights.get(name).to(torch.bfloat16).contiguous() for name in weights.names}
    partial = folder / "model.safetensors.part"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.rename(folder / "model.safetensors")


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]))
