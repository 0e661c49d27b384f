# SPDX-License-Identifier: Apache-2.0
"""SmolLM2 twice: as this engine loads it, and as transformers runs it from weights that are dequantised here.

The reference never sees a batch, a cache block or a draft. Two runs may differ in a token only where the reference's
two best logits lie within `NEAR_TIE` of each other; each such case is listed as a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import gguf
import pytest
import torch
import transformers

from paceline import SamplingParams
from paceline.models.embedded import embedded_model_path
from paceline.models.registry import load_model
from paceline.models.spec import LoadedModel
from paceline.runtime.llm import LLM

NEAR_TIE = 1e-4
MAX_TOKENS = 64
Tokens = tuple[int, ...]

_CHAT = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List the first twelve prime numbers, separated by commas.",
    "Who wrote Hamlet, and when?",
    "Explain gravity to a child.",
    "Repeat three times: the quick brown fox jumps over the lazy dog.",
    "Translate to German: good morning, my friend.",
    "Give me a recipe for pancakes.",
]
_PLAIN = [
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "The chemical formula of water is",
    "1 2 3 4 5 6 7 8 9 10 11 12",
    "Der Himmel über Berlin ist",
    "今日は天気が",
    "import numpy as np\n\nx = np.zeros((3, 4))\nprint(",
    '{"name": "Ada", "born": 1815, "fields": ["mathematics",',
    "Q: What is 17 + 25?\nA: 42\nQ: What is 30 + 12?\nA:",
    "😀😃😄😁",
    "a",
    "In the beginning the fleet was small. Each ship kept its own pace, and whoever was fast arrived first and waited. "
    "Then the ships were tied together, and from that day the slowest of them set the pace for all. The captains met "
    "to talk about it. Some wanted to cut the ropes; others said that the cargo could only be carried together. In the "
    "end they agreed on a rule, which was written on a board and hung on every mast:",
]


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    return load_model("smollm2", "float32")


@pytest.fixture(scope="session")
def prompts(smollm2: LoadedModel) -> list[Tokens]:
    """Twenty prompts, as token ids: conversations, stories, code, numbers, three scripts, one token, a paragraph."""
    tokenizer = smollm2.tokenizer
    texts = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in _CHAT] + _PLAIN
    return [tuple(tokenizer.encode(text)) for text in texts]


class Reference:
    """transformers' Llama in float32, one sequence at a time."""

    def __init__(self) -> None:
        reader = gguf.GGUFReader(embedded_model_path("smollm2"))

        def number(key: str) -> Any:
            field = reader.get_field(f"llama.{key}")
            assert field is not None
            return field.contents()

        config = transformers.LlamaConfig(
            vocab_size=number("vocab_size"),
            hidden_size=number("embedding_length"),
            intermediate_size=number("feed_forward_length"),
            num_hidden_layers=number("block_count"),
            num_attention_heads=number("attention.head_count"),
            num_key_value_heads=number("attention.head_count_kv"),
            max_position_embeddings=number("context_length"),
            rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
            rope_parameters={"rope_type": "default", "rope_theta": number("rope.freq_base")},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,  # so that generate() goes on to the length asked for
        )
        self.model = transformers.LlamaForCausalLM(config).eval()
        names = {"token_embd": "embed_tokens", "output_norm": "norm"}
        parts = {
            "attn_norm": "input_layernorm",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
        }
        parts |= {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"}
        parts |= {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
        weights = {}
        for tensor in reader.tensors:
            stem = tensor.name.removesuffix(".weight")
            if stem.startswith("blk."):
                _, layer, part = stem.split(".")
                name = f"layers.{layer}.{parts[part]}"
            else:
                name = names[stem]
            values = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
            if name.endswith(("q_proj", "k_proj")):
                # Row i of a head's first half stands in row 2i of the file, row i of its second half in row 2i + 1.
                half = config.head_dim // 2
                order = [2 * (r % half) + r // half for r in range(config.head_dim)]
                values = values.view(-1, config.head_dim, values.shape[1])[:, order].flatten(0, 1)
            weights[f"model.{name}.weight"] = values
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        self.model.load_state_dict(weights)

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[tokens, vocabulary], all positions at once."""
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor([ids]), use_cache=False).logits[0]
        return logits

    def greedy(self, prompt: Sequence[int], count: int) -> tuple[Tokens, list[float]]:
        """What ``generate`` says, past the end of the text, and how far apart the two best logits were each time."""
        config = transformers.GenerationConfig(
            max_new_tokens=count,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        ids = torch.tensor([prompt])
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        best = [logits[0].topk(2).values for logits in out.logits]
        return tuple(out.sequences[0, len(prompt) :].tolist()), [float(first - second) for first, second in best]


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="session")
def make_llm(smollm2: LoadedModel) -> Callable[..., LLM]:
    """An engine around the model that is loaded already."""

    def make(**options: Any) -> LLM:
        return LLM(smollm2, **({"max_model_len": 512} | options))

    return make


def complete(llm: LLM, prompts: Sequence[Tokens], max_tokens: int) -> list[Tokens]:
    """Greedy tokens of each prompt, past the end of the text if need be."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    results = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
    return [result.outputs[0].token_ids for result in results]


Complete = Callable[[LLM, Sequence[Tokens], int], list[Tokens]]


@pytest.fixture(scope="session", name="complete")
def complete_fixture() -> Complete:
    return complete


@pytest.fixture(scope="session")
def baseline(make_llm: Callable[..., LLM], prompts: list[Tokens]) -> list[Tokens]:
    """What the engine says to the twenty prompts with its default settings."""
    return complete(make_llm(), prompts, MAX_TOKENS)


@pytest.fixture(scope="session")
def assert_same(reference: Reference) -> Callable[..., None]:
    """Compare outputs to the same prompts; ``expected`` may be longer."""

    def compare(prompts: Sequence[Tokens], expected: Sequence[Tokens], got: Sequence[Tokens]) -> None:
        for prompt, want, have in zip(prompts, expected, got, strict=True):
            at = next((i for i, (a, b) in enumerate(zip(want, have, strict=False)) if a != b), None)
            if at is None:
                assert len(have) <= len(want)
                continue
            logits = reference.logits(prompt + want[:at])[-1]
            best = logits.topk(2)
            margin = float(best.values[0] - best.values[1])
            case = (
                f"prompt {prompt[:8]}..., output token {at}: {want[at]} and {have[at]}, best logits {margin:.2e} apart"
            )
            assert {want[at], have[at]} == set(best.indices.tolist()), case
            assert margin <= NEAR_TIE, case
            warnings.warn(f"near-tie: {case}", stacklevel=2)

    return compare
