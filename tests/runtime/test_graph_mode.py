# SPDX-License-Identifier: Apache-2.0
"""Which decode-graph mode an engine runs in: the one asked for, and else the one that suits the model."""

from __future__ import annotations

from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.core.config import ConfigError
from paceline.core.graphs import FULL, NONE
from tests.eagle3.heads import save_target
from tests.parallel.mixtures import save_mixture

PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 6, 7, 5, 6], [9, 8], [3] * 20)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("mixture")
    save_mixture(folder, "mixtral")
    return str(folder)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_target(tmp_path_factory.mktemp("dense")))


def engine(model: str, **options: Any) -> LLM:
    return LLM(model, max_model_len=64, max_num_seqs=4, kv_cache_memory_bytes=1 << 22, **options)


def steps(llm: LLM) -> tuple[int, int]:
    """Steps with rows that the executor has run, eagerly and FULL."""
    by_mode = llm._rank.executor.steps.by_mode  # type: ignore[attr-defined]
    return by_mode[NONE], by_mode[FULL]


@pytest.mark.parametrize("speculative_config", [None, NGRAM])
def test_a_mixture_in_int8_decodes_in_full_steps(mixture: str, speculative_config: dict[str, Any] | None) -> None:
    llm = engine(mixture, quantization="int8", speculative_config=speculative_config)
    assert llm.config.graphs.mode == "FULL_DECODE_ONLY"
    outputs = [out.outputs[0].token_ids for out in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    eager, full = steps(llm)
    assert full > eager > 0, "prompts are computed eagerly"

    without = {"cudagraph_mode": "NONE"}
    llm = engine(mixture, quantization="int8", speculative_config=speculative_config, compilation_config=without)
    assert llm.config.graphs.mode == "NONE"
    assert [out.outputs[0].token_ids for out in llm.generate(PROMPTS, PARAMS, use_tqdm=False)] == outputs
    assert steps(llm)[1] == 0


@pytest.mark.parametrize(
    "options",
    [{"quantization": "int8"}, {"dtype": "bfloat16"}, {"dtype": "float32"}, {"dtype": "float32", "of": "mixture"}],
)
def test_models_without_a_static_backend_run_eagerly(dense: str, mixture: str, options: dict[str, Any]) -> None:
    chosen = dict(options)
    model = mixture if chosen.pop("of", None) else dense
    llm = engine(model, speculative_config=NGRAM, **chosen)
    assert llm.config.graphs.mode == "NONE"
    outputs = [out.outputs[0].token_ids for out in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    assert steps(llm)[1] == 0

    asked = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [8, 16]}
    llm = engine(model, speculative_config=NGRAM, compilation_config=asked, **chosen)
    assert (llm.config.graphs.mode, llm.config.graphs.capture_sizes) == ("FULL_DECODE_ONLY", (8, 16))
    assert [out.outputs[0].token_ids for out in llm.generate(PROMPTS, PARAMS, use_tqdm=False)] == outputs
    assert steps(llm)[1] > 0


@pytest.mark.parametrize("config", [{}, {"cudagraph_mode": "NONE"}])
def test_sizes_of_which_none_would_be_used_are_refused(dense: str, config: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="cudagraph_capture_sizes"):
        engine(dense, compilation_config={**config, "cudagraph_capture_sizes": [4]})


def test_sizes_alone_go_with_the_default_mode(mixture: str) -> None:
    llm = engine(mixture, quantization="int8", compilation_config={"cudagraph_capture_sizes": [2]})
    assert (llm.config.graphs.mode, llm.config.graphs.capture_sizes) == ("FULL_DECODE_ONLY", (2,))
