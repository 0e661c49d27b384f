# SPDX-License-Identifier: Apache-2.0
"""Two ranks of a real server that share the experts of a small random mixture, and what one rank alone would say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline import SamplingParams
from paceline.models.random_eagle3 import target_config, write_random_eagle3
from paceline.runtime.llm import LLM
from tests.parallel.mixtures import save_mixture
from tests.server.harness import Server, running

MAX_MODEL_LEN, MAX_NUM_SEQS, K = 128, 4, 3
Ids = Sequence[int]


@dataclass(frozen=True)
class Models:
    """Folders: a mixture of experts, and an EAGLE-3 model for it that is a mixture too."""

    target: Path
    head: Path


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("line")
    models = Models(folder / "target", folder / "head")
    models.target.mkdir()
    save_mixture(models.target, "mixtral", num_hidden_layers=6)
    write_random_eagle3(target_config(str(models.target)), models.head, experts=3, draft_vocab_size=200)
    return models


def command(models: Models, *flags: str) -> list[str]:
    """The command line of a server with two ranks that share experts, draft, and agree on graph sizes."""
    speculation = {"method": "eagle3", "model": str(models.head), "num_speculative_tokens": K}
    limits = {
        "--max-model-len": MAX_MODEL_LEN,
        "--max-num-seqs": MAX_NUM_SEQS,
        "--max-num-batched-tokens": 64,
        "--block-size": 8,
        "--num-gpu-blocks-override": 100,
        "--speculative-config": json.dumps(speculation),
        "--compilation-config": '{"cudagraph_mode": "FULL_DECODE_ONLY"}',
    }
    chosen = [str(part) for limit in limits.items() for part in limit]
    ranks = ["--data-parallel-size", "2", "--enable-expert-parallel"]
    return ["-m", "paceline", "serve", str(models.target), "--port", "0", "--dtype", "float32", *ranks, *chosen, *flags]


@pytest.fixture(scope="session")
def experts(models: Models) -> Iterator[Server]:
    with running(command(models)) as server:
        yield server


Alone = Callable[[Ids, int], tuple[int, ...]]


@pytest.fixture(scope="session")
def alone(models: Models) -> Alone:
    """What one rank with all experts says, without drafts and one request at a time."""
    llm = LLM(str(models.target), dtype="float32", max_model_len=MAX_MODEL_LEN)

    def complete(prompt: Ids, max_tokens: int) -> tuple[int, ...]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        [result] = llm.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)
        return result.outputs[0].token_ids

    return complete
