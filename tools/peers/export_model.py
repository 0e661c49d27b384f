# SPDX-License-Identifier: Apache-2.0
"""Write a GGUF model as a Hugging Face folder in bfloat16, for servers that read no GGUF.

    python tools/peers/export_model.py MODEL.gguf FOLDER

Runs in paceline's own environment: weights and tokenizer are read by its loader.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.models.gguf import GGUFWeights
from paceline.models.gguf_file import GGUFFile
from paceline.models.gguf_tokenizer import read_tokenizer
from paceline.models.huggingface import save_json, save_tokenizer, shape_fields
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
        **shape_fields(config),
        "eos_token_id": eos_token_id,
        "torch_dtype": "bfloat16",
    }


def export(source: Path, folder: Path) -> None:
    """Write ``source`` to ``folder``, the weights last: a folder with weights is complete."""
    file = GGUFFile(source)
    weights = GGUFWeights(file)
    folder.mkdir(parents=True, exist_ok=True)
    config = config_json(weights.config, file.get("tokenizer.ggml.eos_token_id", None))
    save_json(config, folder / "config.json")
    save_tokenizer(read_tokenizer(file.get), folder, weights.config.max_position)
    tensors = {name: weights.get(name).to(torch.bfloat16).contiguous() for name in weights.names}
    partial = folder / "model.safetensors.part"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.rename(folder / "model.safetensors")


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]))
