# SPDX-License-Identifier: Apache-2.0
"""`test_invariance` at full size: 20 prompts x 64 tokens under every setting."""

from __future__ import annotations

from typing import Any

import pytest

from .test_invariance import NGRAM, AssertSame, Complete, MakeLLM, Tokens, name

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 8},
        {"max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 8192},
        {"max_num_seqs": 1},
        {"max_num_seqs": 5},
        {"speculative_config": NGRAM},
        {"speculative_config": NGRAM | {"pad_resumed": "off"}},
        {"speculative_config": NGRAM | {"pad_resumed": "running"}},
        {"max_model_len": 256, "num_gpu_blocks_override": 18},
        {"max_model_len": 256, "num_gpu_blocks_override": 18, "enable_prefix_caching": False},
        {"max_model_len": 256, "num_gpu_blocks_override": 18, "speculative_config": NGRAM},
    ],
    ids=name,
)
def test_settings(
    make_llm: MakeLLM,
    prompts: list[Tokens],
    baseline: list[Tokens],
    complete: Complete,
    assert_same: AssertSame,
    options: dict[str, Any],
) -> None:
    llm = make_llm(**options)
    assert_same(prompts, baseline, complete(llm, prompts, 64))
    if "num_gpu_blocks_override" in options:
        assert llm.stats().preemptions > 0
