# SPDX-License-Identifier: Apache-2.0
"""A rank whose FULL steps are recorded graphs, under the real scheduler: the same tokens as without graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from paceline.core.config import CacheConfig, EngineConfig, GraphConfig, SchedulerConfig, SpeculationConfig
from paceline.core.graphs import FULL, GraphDispatcher
from paceline.core.lockstep import agree
from paceline.core.plan import TokenLogprobs
from paceline.core.request import Request, SamplingParams, StoredTokens
from paceline.core.scheduler import Scheduler
from paceline.engine.rank import Rank
from paceline.execution import decode_graphs
from paceline.execution.runner import ModelExecutor
from paceline.models.llama import Llama
from paceline.models.spec import LlamaConfig
from tests.execution.recording import Recording
from tools.gpu.models import TINY, TINY_MIXTURE, random_head, random_model

K, LENGTH = 3, 40
# The second repeats itself, so that prompt lookup finds something.
PROMPTS = [
    [(7 * i * i + 3) % 256 for i in range(13)],
    [5, 9, 11, 13] * 8,
    [200, 7, 9],
    [(5 * i + 1) % 256 for i in range(40)],
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)


@dataclass
class Engine:
    """One rank, with graphs or without; ``full`` counts its FULL steps, ``replays`` those that a graph computed."""

    model: Llama
    method: str | None = None
    graphs: bool = True
    synthetic: dict[str, Any] = field(default_factory=dict)
    max_model_len: int = 128
    sizes: tuple[int, ...] | None = (16,)
    full: int = 0
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        speculation: dict[str, Any] = {}
        if self.method is not None:
            speculation = {"method": self.method, "num_speculative_tokens": K, **self.synthetic}
            speculation |= {} if self.method == "ngram" else {"model": "made in memory"}
        self.config = EngineConfig(
            scheduler=SchedulerConfig(max_num_seqs=4, max_model_len=self.max_model_len, max_num_batched_tokens=64),
            cache=CacheConfig(num_blocks=100, block_size=8),
            speculation=SpeculationConfig(**speculation),
            graphs=GraphConfig(mode="FULL_DECODE_ONLY" if self.graphs else "NONE", capture_sizes=self.sizes),
        )
        draft: Any = None
        if self.method == "eagle3":
            draft = random_head(self.model)
        elif self.method == "draft_model":
            draft = random_model(TINY)
        self.recording = Recording()
        record = self.recording if self.graphs else None
        self.executor = ModelExecutor(self.model, self.config, draft=draft, record=record)

    @property
    def replays(self) -> int:
        return self.recording.replays

    def serve(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams] | None = None
    ) -> list[list[int]]:
        """The tokens of each prompt; they come two steps apart."""
        rank, graphs = Rank(Scheduler(self.config), self.executor), GraphDispatcher(self.config)
        outputs: list[list[int]] = [[] for _ in prompts]
        each = params or [GREEDY] * len(prompts)
        step = 0
        while rank.has_work or step < 2 * len(prompts):
            if step % 2 == 0 and step // 2 < len(prompts):
                rank.add(Request(str(step // 2), StoredTokens(list(prompts[step // 2])), each[step // 2]))
            rank.begin(0.0)
            agreement = agree([rank.vote(step, 0)], graphs)
            self.full += agreement.mode == FULL
            rank.launch(agreement)
            for output in rank.finish(rank.collect(), 0.0):
                outputs[int(output.request_id)] += output.token_ids
                if output.logprobs:
                    self.logprobs.setdefault(output.request_id, []).extend(output.logprobs)
                if output.error:
                    self.errors[output.request_id] = output.error
            step += 1
        return outputs


def both(shape: LlamaConfig, method: str | None = None, **options: Any) -> tuple[Engine, Engine]:
    model = random_model(shape)
    return Engine(model, method, graphs=False, **options), Engine(model, method, **options)


@pytest.mark.parametrize("method", [None, "ngram", "eagle3", "draft_model"])
@pytest.mark.parametrize("shape", [TINY, TINY_MIXTURE], ids=["dense", "mixture"])
def test_graphs_change_no_token(shape: LlamaConfig, method: str | None) -> None:
    """Up to four requests in graphs for sixteen tokens; padded rows and drafts that are right among them."""
    general, graphs = both(shape, method)
    expected = general.serve(PROMPTS)
    assert graphs.serve(PROMPTS) == expected
    assert all(len(tokens) == LENGTH for tokens in expected)
    assert graphs.replays == graphs.full > 10
    assert not general.full


def test_all_sizes_change_no_token() -> None:
    general, graphs = both(TINY, "ngram", sizes=(4, 8, 12, 16))
    assert graphs.serve(PROMPTS) == general.serve(PROMPTS)
    assert graphs.replays == graphs.full


@pytest.mark.parametrize("method", ["ngram", "eagle3"])
@pytest.mark.parametrize("shape", [TINY, TINY_MIXTURE], ids=["dense", "mixture"])
def test_synthetic_acceptance_draws_the_same_numbers(shape: LlamaConfig, method: str) -> None:
    """What is accepted are drafts that the model would not have said, so every number counts."""
    rates = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": (0.8, 0.6, 0.4)}
    general, graphs = both(shape, method, synthetic=rates)
    expected = general.serve(PROMPTS)
    assert graphs.serve(PROMPTS) == expected
    assert graphs.replays == graphs.full > 10
    plain, _ = both(shape)
    assert (plain.serve(PROMPTS) != expected) == (method == "eagle3") or method == "ngram"


def test_contexts_grow_through_tables_of_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "LEAST_TOKENS", 16)
    general, graphs = both(TINY, "ngram", max_model_len=200)
    params = [SamplingParams(temperature=0.0, max_tokens=140, ignore_eos=True)] * 2
    assert len(graphs.recording.captured) == 5
    assert graphs.serve(PROMPTS[:2], params) == general.serve(PROMPTS[:2], params)
    assert graphs.replays == graphs.full


def test_a_context_longer_than_captured_takes_the_general_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """S14: rows change over when they outgrow the tables, and come to the same tokens."""
    general, _ = both(TINY, "ngram")
    monkeypatch.setattr(decode_graphs, "table_lengths", lambda *_: (4,))
    monkeypatch.setattr("paceline.execution.runner.table_lengths", lambda *_: (4,))
    graphs = Engine(general.model, "ngram")
    assert graphs.serve(PROMPTS) == general.serve(PROMPTS)
    assert 0 < graphs.replays < graphs.full


def test_rows_that_need_more_than_the_argmax_take_the_logits() -> None:
    """Temperature, filters, penalties and log-probabilities beside a greedy row, in graphs."""
    params = [
        GREEDY,
        SamplingParams(temperature=0.8, seed=5, top_k=20, top_p=0.9, max_tokens=LENGTH, ignore_eos=True),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=LENGTH, ignore_eos=True),
        SamplingParams(temperature=0.0, logprobs=3, max_tokens=LENGTH, ignore_eos=True),
    ]
    general, graphs = both(TINY, "ngram")
    assert graphs.serve(PROMPTS, params) == general.serve(PROMPTS, params)
    assert graphs.replays == graphs.full > 10
    assert list(graphs.logprobs) == list(general.logprobs) == ["3"]
    for found, expected in zip(graphs.logprobs["3"], general.logprobs["3"], strict=True):
        assert found.token_id == expected.token_id
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)


def test_a_row_that_is_not_finite_fails_alone() -> None:
    """Its hidden states are told by the graph; the others go on."""
    model = random_model(TINY)
    model.embedding[250] = float("nan")
    bad = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, logit_bias={250: 100.0})
    general, graphs = Engine(model, graphs=False), Engine(model)
    params = [GREEDY, bad, GREEDY]
    prompts = [[7, 8, 9], [17, 18, 19], [27, 28]]
    assert graphs.serve(prompts, params) == general.serve(prompts, params)
    assert list(graphs.errors) == list(general.errors) == ["1"]
    assert "not finite" in graphs.errors["1"]
    assert all(bool(torch.isfinite(layer).all()) for layer in graphs.executor.cache.layers)


def test_an_idle_rank_replays_the_graph_of_the_others_size() -> None:
    """A dummy: no row, no cache but block 0."""
    engine = Engine(random_model(TINY_MIXTURE))
    engine.serve(PROMPTS[:1])
    before, replays = [layer.clone() for layer in engine.executor.cache.layers], engine.replays
    idle, busy = Rank(Scheduler(engine.config), engine.executor), Rank(Scheduler(engine.config), engine.executor)
    busy.add(Request("a", StoredTokens([4]), GREEDY))
    busy.begin(0.0)
    idle.begin(0.0)
    votes = [idle.vote(0, 0), busy.vote(0, 0)]
    agreement = agree([votes[0], votes[1].__class__(0, 0, 1, 1, 1, FULL, True)], GraphDispatcher(engine.config))
    assert agreement.mode == FULL
    idle.launch(agreement)
    assert not idle.collect().sampled
    assert engine.replays == replays + 1
    assert engine.executor.steps.dummies_by_mode[FULL] == 1
    for layer, kept in zip(engine.executor.cache.layers, before, strict=True):
        assert torch.equal(layer[1:], kept[1:])
