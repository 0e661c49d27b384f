# SPDX-License-Identifier: Apache-2.0
"""A head behind the engines that users meet: `LLM`, a server's, and the command that writes a random one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline import SamplingParams
from paceline.cli import main
from paceline.core.config import ConfigError
from paceline.models.spec import UnsupportedModel
from paceline.runtime.llm import LLM
from paceline.runtime.serving import build_engine
from tests.eagle3.heads import LAYERS, PROMPTS, save_head, save_target

PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 22}


def drafting(head: Path, **more: Any) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3} | more


@pytest.fixture
def head(target_folder: Path, tmp_path: Path) -> Path:
    return save_head(target_folder, tmp_path / "head")


def test_greedy_text_is_that_of_the_model_alone(target_folder: Path, head: Path) -> None:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    expected = LLM(target_folder, **OPTIONS).generate(prompts, PARAMS, use_tqdm=False)
    llm = LLM(target_folder, speculative_config=drafting(head), **OPTIONS)
    got = llm.generate(prompts, PARAMS, use_tqdm=False)
    assert [r.outputs for r in got] == [r.outputs for r in expected]
    assert llm.stats().num_draft_tokens > 0
    # The pool holds the KV of the head beside that of the target's layers: 16 tokens x (key + value) x 2 heads x 8 x 4.
    assert llm.config.cache.num_blocks == (1 << 22) // ((LAYERS + 1) * 16 * 2 * 2 * 8 * 4)


def test_what_does_not_fit_together_is_refused(target_folder: Path, head: Path, tmp_path: Path) -> None:
    other = save_target(tmp_path / "other", hidden_size=64)
    with pytest.raises(UnsupportedModel, match=r"embed_tokens\.weight: is missing, .*64 wide"):
        LLM(other, speculative_config=drafting(head), **OPTIONS)
    smaller = save_target(tmp_path / "smaller", vocab_size=300)
    with pytest.raises(ConfigError, match=r"speculation\.model: its target has a vocabulary of 256 tokens"):
        LLM(smaller, speculative_config=drafting(head), **OPTIONS)
    with pytest.raises(UnsupportedModel, match=r"draft model .* not a folder with a config"):
        LLM(target_folder, speculative_config=drafting(tmp_path / "nothing"), **OPTIONS)


def test_a_head_of_short_context_does_not_shorten_the_engine(target_folder: Path, head: Path) -> None:
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    options: dict[str, Any] = {
        "model": str(target_folder),
        "seed": 0,
        "max_model_len": "auto",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "long_prefill_token_threshold": 0,
        "scheduling_policy": "fcfs",
        "block_size": 16,
        "num_gpu_blocks_override": None,
        "enable_prefix_caching": True,
        "speculative_config": drafting(head),
    }
    assert build_engine(OPTIONS | options).model.max_model_len == 256


def test_a_random_head_by_command(target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made"
    command = ["random-eagle3", str(target_folder), str(out), "--experts", "4", "--draft-vocab-size", "100"]
    assert main(command) == 0
    assert "MB" in capsys.readouterr().out
    rates = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1, 1, 1]}
    llm = LLM(target_folder, speculative_config=drafting(out, **rates), **OPTIONS)
    llm.generate([{"prompt_token_ids": PROMPTS[0]}], PARAMS, use_tqdm=False)
    assert llm.stats().acceptance_length == 4.0
    assert main(command) == 2
    assert "is there already; name another folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["nothing"], "model 'nothing': not a known name"),
        (["TARGET", "--draft-vocab-size", "257"], "draft_vocab_size: must be 1 to 256"),
        (["TARGET", "--experts", "2", "--top-k", "3"], "top_k: must be 1 to 2"),
        (["TARGET", "--experts", "-1"], "--experts: must be at least 0"),
        (["TARGET", "--seed", "1.5"], "must be an integer"),
    ],
)
def test_commands_that_cannot_be_honoured(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], says: str
) -> None:
    target = str(target_folder) if args[0] == "TARGET" else args[0]
    assert main(["random-eagle3", target, str(tmp_path / "out"), *args[1:]]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out" / "config.json").exists()
