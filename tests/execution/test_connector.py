# SPDX-License-Identifier: Apache-2.0
"""A connector's worker half in the executor: KV that was moved is KV, and KV that was not is an error of its row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.connectors.decode_bench.scheduler import DecodeBenchScheduler, Fill
from paceline.connectors.decode_bench.worker import DecodeBenchWorker
from paceline.core.config import CacheConfig, EngineConfig, SchedulerConfig
from paceline.core.plan import StepOutput, StepPlan, TransferEvent
from paceline.core.request import Request, SamplingParams, StoredTokens
from paceline.core.scheduler import Scheduler
from paceline.engine.rank import Rank
from paceline.execution.runner import ModelExecutor
from paceline.models.llama import Llama

BLOCK_SIZE = 4
PROMPTS = {"a": [(5 * i * i + 3) % 64 for i in range(30)], "b": [(3 * i + 1) % 64 for i in range(21)]}
COUNT = 10


class Engine:
    """A rank with a real model, and what came out of it."""

    def __init__(
        self, model: Llama, worker: Any = None, *, policy: Any = "fail", num_blocks: int = 60, caching: bool = False
    ) -> None:
        config = EngineConfig(
            scheduler=SchedulerConfig(max_model_len=64, load_failure_policy=policy),
            cache=CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, enable_prefix_caching=caching),
        )
        self.executor = ModelExecutor(model, config, connector=worker)
        self.scheduler = Scheduler(config, None if worker is None else DecodeBenchScheduler(BLOCK_SIZE))
        self.rank = Rank(self.scheduler, self.executor)
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, StepOutput] = {}
        self.requests: dict[str, Request] = {}

    def add(self, name: str, max_tokens: int = COUNT) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        request = self.requests[name] = Request(name, StoredTokens(PROMPTS[name]), params)
        self.rank.add(request)
        self.tokens[name] = []
        return request

    def step(self) -> None:
        for output in self.rank.step(0.0):
            self.tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self.ended[output.request_id] = output

    def run(self) -> None:
        for _ in range(200):
            if not self.rank.has_work:
                return
            self.step()
        raise AssertionError("does not come to an end")


class Courier(DecodeBenchWorker):
    """Brings the KV that another engine has computed, in place of made-up numbers; what is in ``lost`` stays away."""

    def __init__(self, source: dict[int, tuple[list[Tensor], list[int]]], lost: Sequence[int] = ()) -> None:
        super().__init__()
        self.source = source
        self.lost = lost
        self.bad: set[int] = set()
        self.calls: list[str] = []

    def start_load_kv(self, meta: Sequence[Fill]) -> None:
        self.calls.append("load")
        for fill in meta:
            layers, table = self.source[fill.seq]
            for index, (theirs, ours) in enumerate(zip(table, fill.blocks[0], strict=False)):
                for layer, other in zip(self._groups[0], layers, strict=True):
                    layer[ours] = float("nan") if index in self.lost else other[theirs]
                if index in self.lost:
                    self.bad.add(ours)

    def wait_for_layer_load(self, layer: int) -> None:
        self.calls.append(f"wait {layer}")

    def save_kv_layer(self, layer: int, cache: Tensor) -> None:
        self.calls.append(f"save {layer}")

    def wait_for_save(self) -> None:
        self.calls.append("saved")

    def handle_preemptions(self, seqs: Sequence[int]) -> None:
        self.calls.append(f"preempted {list(seqs)}")

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        bad, self.bad = frozenset(self.bad), set()
        return bad


@pytest.fixture
def computed(model: Llama) -> tuple[dict[str, list[int]], dict[int, tuple[list[Tensor], list[int]]]]:
    """Tokens of every prompt from an engine without a connector, and the KV of the prompts, by sequence number."""
    engine = Engine(model)
    tables = {}
    for name in PROMPTS:
        engine.add(name)
    engine.step()
    for i, name in enumerate(PROMPTS):
        tables[i] = ([layer.clone() for layer in engine.executor.cache.layers], list(engine.requests[name].tables[0]))
    engine.run()
    return engine.tokens, tables


def test_decoding_goes_on_from_moved_kv_as_if_it_had_been_computed_here(model: Llama, computed: Any) -> None:
    tokens, source = computed
    engine = Engine(model, courier := Courier(source))
    for name in PROMPTS:
        engine.add(name)
    engine.step()
    assert [engine.requests[n].computed for n in PROMPTS] == [len(p) for p in PROMPTS.values()]
    assert courier.calls == ["load", "wait 0", "save 0", "wait 1", "save 1", "saved"]
    engine.run()
    assert engine.tokens == tokens
    assert courier.calls.count("load") == 1


@pytest.mark.parametrize("lost", [[0], [3], [2, 4]])
def test_L11_a_load_that_fails_is_an_error_of_its_request_after_a_step_that_is_right_for_the_others(
    model: Llama, computed: Any, lost: list[int]
) -> None:
    tokens, source = computed
    engine = Engine(model, Courier(source, lost))
    engine.add("a")
    engine.step()
    assert engine.ended["a"].finish_reason == "error"
    assert "could not be loaded" in (engine.ended["a"].error or "")
    assert engine.tokens["a"] == []
    assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.num_usable
    engine = Engine(model, courier := Courier(source))
    engine.add("a")
    engine.step()
    courier.lost = lost
    engine.add("b")
    engine.run()
    assert engine.ended["b"].finish_reason == "error"
    assert engine.tokens["a"] == tokens["a"], "its peer in the step was not touched"


class Raiser(Courier):
    """A load that raises while ``armed``: when it starts (layer None), or when a layer waits for it.

    ``told``: the request whose blocks are named beside it, by its place among those that join.
    """

    def __init__(self, source: Any, layer: int | None, told: int | None = None) -> None:
        super().__init__(source)
        self.layer = layer
        self.told = told
        self.armed = True

    def _raise(self, layer: int | None) -> None:
        if self.armed and layer == self.layer:
            raise ConnectionError("the other side is gone")

    def start_load_kv(self, meta: Sequence[Fill]) -> None:
        super().start_load_kv(meta)
        for i, fill in enumerate(meta if self.armed else ()):
            if self.told in (None, i):
                for layer in self._groups[0]:
                    layer[list(fill.blocks[0])] = float("nan")
            if self.told == i:
                self.bad.update(fill.blocks[0])
        self._raise(None)

    def wait_for_layer_load(self, layer: int) -> None:
        super().wait_for_layer_load(layer)
        self._raise(layer)


class Offers(DecodeBenchScheduler):
    """Loads for the requests ``names`` only."""

    def __init__(self, *names: str) -> None:
        super().__init__(BLOCK_SIZE)
        self.names = names

    def get_num_new_matched_tokens(self, request: Request, num_computed: int) -> tuple[int, bool]:
        return super().get_num_new_matched_tokens(request, num_computed) if request.id in self.names else (0, False)


@pytest.mark.parametrize("layer", [None, 0, 1])
def test_L11_a_load_that_raises_is_an_error_of_its_request_after_the_whole_step(
    model: Llama, computed: Any, layer: int | None
) -> None:
    tokens, source = computed
    engine = Engine(model, courier := Raiser(source, layer))
    courier.armed = False
    engine.add("a")
    engine.step()
    courier.armed = True
    engine.add("b")
    engine.step()
    courier.armed = False
    assert courier.calls[-6:] == ["load", "wait 0", "save 0", "wait 1", "save 1", "saved"]
    error = "the KV of this request could not be loaded: ConnectionError: the other side is gone"
    assert (engine.ended["b"].finish_reason, engine.ended["b"].error) == ("error", error)
    engine.run()
    assert engine.tokens == {"a": tokens["a"], "b": []}
    assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.num_usable


@pytest.mark.parametrize("layer", [None, 0, 1])
@pytest.mark.parametrize("told", [None, 0, 1])
def test_what_a_load_that_raises_should_have_brought_is_recomputed_if_that_is_the_policy(
    model: Llama, computed: Any, told: int | None, layer: int | None
) -> None:
    tokens, source = computed
    engine = Engine(model, courier := Raiser(source, layer, told), policy="recompute", caching=True)
    for name in PROMPTS:
        engine.add(name)
    engine.step()
    courier.armed = False
    lost = list(PROMPTS) if told is None else [list(PROMPTS)[told]]
    assert [name for name in PROMPTS if not engine.tokens[name]] == lost
    assert engine.scheduler.stats.load_failures == len(lost)
    engine.run()
    assert engine.tokens == tokens
    engine.scheduler.connector = None
    for name in PROMPTS:
        engine.add(name)
    engine.step()
    assert engine.scheduler.stats.prefix_hits > 0
    engine.run()
    assert engine.tokens == tokens, "nobody hits what was not loaded"


def test_who_hit_the_prefix_cache_beside_a_load_that_raises_runs_again(model: Llama, computed: Any) -> None:
    tokens, source = computed
    engine = Engine(model, courier := Raiser({2: source[1]}, None), caching=True)
    engine.scheduler.connector = Offers("b")
    engine.add("a")
    engine.run()
    for name in PROMPTS:
        engine.add(name)
    engine.step()
    courier.armed = False
    assert (engine.scheduler.stats.prefix_hits, engine.tokens["a"]) == (28, [])
    assert engine.ended["b"].finish_reason == "error"
    engine.run()
    assert engine.tokens["a"] == tokens["a"]


@pytest.mark.parametrize("told", [0, 1])
def test_blocks_told_beside_an_exception_say_whose_load_it_was(model: Llama, computed: Any, told: int) -> None:
    tokens, source = computed
    engine = Engine(model, courier := Raiser(source, None, told))
    for name in PROMPTS:
        engine.add(name)
    engine.step()
    courier.armed = False
    engine.run()
    lost, kept = ("a", "b") if told == 0 else ("b", "a")
    assert engine.ended[lost].finish_reason == "error"
    assert "could not be loaded: ConnectionError" in (engine.ended[lost].error or "")
    assert engine.tokens[kept] == tokens[kept]


def test_an_exception_is_no_fault_of_those_who_load_nothing(model: Llama, computed: Any) -> None:
    tokens, source = computed
    engine = Engine(model, courier := Raiser({1: source[1]}, None))
    engine.scheduler.connector = Offers("b")
    for name in PROMPTS:
        engine.add(name)
    engine.step()
    courier.armed = False
    engine.run()
    assert engine.ended["b"].finish_reason == "error"
    assert engine.tokens["a"] == tokens["a"], "it joined beside the other"


def test_an_exception_that_is_nobodys_fault_ends_the_engine(model: Llama, computed: Any) -> None:
    engine = Engine(model, Raiser(computed[1], None))
    with pytest.raises(ConnectionError):
        engine.executor.launch(StepPlan(0, (), 0, 0, load_meta=[]))


class Reporter(Courier):
    """Reports what is lost as the end of the transfer too."""

    def start_load_kv(self, meta: Sequence[Fill]) -> None:
        super().start_load_kv(meta)
        self.ended = [
            TransferEvent("loaded", fill.seq, 0, error="lost", failed_blocks=tuple(sorted(self.bad))) for fill in meta
        ]

    def get_finished(self) -> Sequence[TransferEvent]:
        ended, self.ended = self.ended, []
        return ended


@pytest.mark.parametrize("worker", [Courier, Reporter])
@pytest.mark.parametrize("lost", [[0], [3], [2, 4]])
def test_a_failure_that_is_told_is_recomputed_if_that_is_the_policy(
    model: Llama, computed: Any, lost: list[int], worker: type[Courier]
) -> None:
    tokens, source = computed
    engine = Engine(model, worker(source, lost), policy="recompute")
    engine.add("a")
    engine.run()
    assert engine.ended["a"].finish_reason == "length"
    assert engine.tokens["a"] == tokens["a"]
    assert engine.scheduler.stats.load_failures == 1


def test_a_preempted_request_is_told_before_its_blocks_are_used_again(model: Llama, computed: Any) -> None:
    _, source = computed
    engine = Engine(model, courier := Courier(source))
    request = engine.add("a")
    engine.step()
    engine.scheduler.preempt("a")
    engine.step()
    assert courier.calls.index(f"preempted {[request.seq]}") < len(courier.calls) - 1 - courier.calls[::-1].index(
        "load"
    )


@pytest.mark.parametrize("std", [0.0, 0.05])
def test_decode_bench_lets_every_request_decode_from_its_first_step(model: Llama, std: float) -> None:
    engine = Engine(model, DecodeBenchWorker(0.015, std))
    engine.add("a")
    engine.step()
    table = engine.requests["a"].tables[0]
    filled = engine.executor.cache.layers[0][table[: len(PROMPTS["a"]) // BLOCK_SIZE]]
    assert filled.mean().item() == pytest.approx(0.015, abs=0.01)
    assert (filled == 0.015).all() == (std == 0.0)
    assert len(engine.tokens["a"]) == 1
    engine.run()
    assert engine.ended["a"].finish_reason == "length"
    assert len(engine.tokens["a"]) == COUNT


def test_a_plan_with_loads_needs_an_executor_with_a_connector(model: Llama) -> None:
    engine = Engine(model)
    engine.scheduler.connector = DecodeBenchScheduler(BLOCK_SIZE)
    engine.add("a")
    with pytest.raises(RuntimeError, match="no connector"):
        engine.step()


def test_finite_blocks_are_all_that_anybody_reads(model: Llama) -> None:
    """Blocks of a failed load are handed to the next request, whose tokens are right."""
    engine = Engine(model, num_blocks=20)
    engine.add("b")
    engine.run()
    right = engine.tokens["b"]
    source = {0: ([torch.zeros_like(layer) for layer in engine.executor.cache.layers], list(range(1, 20)))}
    engine = Engine(model, Courier(source, [1]), num_blocks=20)
    engine.add("a")
    engine.run()
    engine.scheduler.connector = None
    engine.add("b")
    engine.run()
    assert engine.tokens["b"] == right


@pytest.mark.parametrize("told", [None, 0])
def test_what_a_failed_load_left_behind_reaches_nobody(
    model: Llama, monkeypatch: pytest.MonkeyPatch, told: int | None
) -> None:
    """Slots that a request has not come to yet are read, and masked, beside a longer request: 0 times NaN is NaN."""
    monkeypatch.setitem(PROMPTS, "b", [(3 * i + 1) % 64 for i in range(22)])
    undisturbed = Engine(model)
    blank = [torch.zeros_like(layer) for layer in undisturbed.executor.cache.layers]
    source = dict.fromkeys(range(2), (blank, list(range(1, 20))))
    courier = Raiser(source, None) if told is None else Courier(source, range(20))
    engine = Engine(model, courier, policy="recompute")
    for each in (undisturbed, engine):
        for name in PROMPTS:
            each.add(name)
        each.step()
    if isinstance(courier, Raiser):
        courier.armed = False
    undisturbed.run()
    engine.run()
    assert engine.scheduler.stats.load_failures == len(PROMPTS)
    assert engine.tokens == undisturbed.tokens
