# SPDX-License-Identifier: Apache-2.0
"""FULL steps by the static backend under a real scheduler: one rank, and two that share a mixture's experts.

Ranks are threads here; votes and tokens go through the memory that processes of one host would share.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.config import CacheConfig, EngineConfig, GraphConfig, SchedulerConfig, SpeculationConfig
from paceline.core.graphs import FULL, GraphDispatcher
from paceline.core.lockstep import SLEEP, agree
from paceline.core.request import Request, SamplingParams, StoredTokens
from paceline.core.scheduler import Scheduler
from paceline.engine.rank import Rank
from paceline.execution.attention import PagedAttention, RowSpan
from paceline.execution.kvcache import KVCache
from paceline.execution.runner import ModelExecutor
from paceline.models import static
from paceline.models.eagle3_checkpoint import load_eagle3
from paceline.models.random_eagle3 import target_config, write_random_eagle3
from paceline.models.registry import load_model
from paceline.parallel.board import ROWS_BYTES, Board
from paceline.parallel.shared import SharedExchange
from paceline.parallel.votes import SharedVotes
from tests.parallel.mixtures import save_mixture

K, DEADLINE_S = 3, 60.0
PROMPTS = [[(7 * i * i + 3) % 256 for i in range(13)], [(5 * i + 11) % 256 for i in range(21)], [200, 7, 9]]
LENGTH = 24


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A mixture, and an EAGLE-3 model for it that is one too."""
    target, head = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("head")
    save_mixture(target, "mixtral", num_hidden_layers=6)
    write_random_eagle3(target_config(str(target)), head, experts=3, draft_vocab_size=200)
    return target, head


@dataclass
class Group:
    """Ranks as threads, each with a scheduler and an executor; ``steps``: how many were FULL, of how many with rows."""

    folders: tuple[Path, Path]
    method: str | None
    graphs: bool = True
    capture_sizes: tuple[int, ...] | None = None
    max_model_len: int = 128
    outputs: dict[str, list[int]] = field(default_factory=dict)
    full: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)

    def config(self) -> EngineConfig:
        speculation: dict[str, Any] = {}
        if self.method is not None:
            speculation = {"method": self.method, "num_speculative_tokens": K}
            speculation |= {"model": "head"} if self.method == "eagle3" else {}
        return EngineConfig(
            scheduler=SchedulerConfig(max_num_seqs=4, max_model_len=self.max_model_len, max_num_batched_tokens=64),
            cache=CacheConfig(num_blocks=100, block_size=8),
            speculation=SpeculationConfig(**speculation),
            graphs=GraphConfig(mode="FULL_DECODE_ONLY" if self.graphs else "NONE", capture_sizes=self.capture_sizes),
        )

    def serve(self, requests: Sequence[dict[str, tuple[int, list[int]]]]) -> dict[str, list[int]]:
        """``requests``: of each rank by name, the step in which it comes and its prompt; the tokens of each."""
        ranks = len(requests)
        memory = mmap.mmap(-1, ranks * (1 + ranks) * ROWS_BYTES + (1 << 20))
        self.full, self.steps = [0] * ranks, [0] * ranks
        boards = [Board(memory, rank, ranks, DEADLINE_S) for rank in range(ranks)]
        threads = [
            threading.Thread(target=self._guarded, args=(board, own), daemon=True)
            for board, own in zip(boards, requests, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * DEADLINE_S)
        assert not any(thread.is_alive() for thread in threads)
        if self.failures:
            raise self.failures[0]
        return self.outputs

    def _guarded(self, board: Board, requests: dict[str, tuple[int, list[int]]]) -> None:
        try:
            self._run(board, requests)
        except BaseException as error:
            self.failures.append(error)

    def _run(self, board: Board, requests: dict[str, tuple[int, list[int]]]) -> None:
        config = self.config()
        exchange = SharedExchange(board) if board.ranks > 1 else None
        model = load_model(self.folders[0], quantization="int8", parallel=exchange).model
        draft = load_eagle3(self.folders[1], model, parallel=exchange) if self.method == "eagle3" else None
        rank = Rank(Scheduler(config), ModelExecutor(model, config, draft=draft))
        votes, graphs = SharedVotes(board, DEADLINE_S), GraphDispatcher(config)
        params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
        waiting = dict(requests)
        for step in range(1000):
            for name, (begin, prompt) in list(waiting.items()):
                if begin <= step:
                    del waiting[name]
                    self.outputs[name] = []
                    rank.add(Request(name, StoredTokens(prompt), params))
            rank.begin(0.0)
            agreement = agree(votes.join(rank.vote(step, 0)), graphs)
            if agreement.run == SLEEP:
                if not any(row[0] for row in board.share(len(waiting))):
                    return
                continue
            assert agreement.mode == FULL or not agreement.size
            if rank.plan.rows:
                self.steps[board.rank] += 1
                self.full[board.rank] += agreement.mode == FULL
            rank.launch(agreement)
            for output in rank.finish(rank.collect(), 0.0):
                assert output.error is None
                self.outputs[output.request_id] += output.token_ids


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> list[list[int]]:
    """What follows each prompt by the general path, one token after the other and nobody else there."""
    model = load_model(folders[0], quantization="int8").model
    found = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            cache = KVCache(model.config, 20, 8, model.dtype)
            ids, start = list(prompt), 0
            while len(ids) < len(prompt) + LENGTH:
                new = ids[start:]
                spans = [RowSpan(start, len(new), torch.arange(1, 20).numpy())]
                attention = PagedAttention(cache, spans, model.config.num_heads)
                hidden = model.forward(torch.tensor(new), torch.arange(start, len(ids)), attention)
                start = len(ids)
                ids.append(int(model.logits(hidden[-1:]).argmax()))
            found.append(ids[len(prompt) :])
    return found


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many steps the static backend computed (by its own result), declined, and served without rows."""
    counts = {"computed": 0, "declined": 0, "idle": 0}
    forward, idle = static.StaticMixture.forward, static.StaticMixture.idle

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        out = forward(self, *args, **options)
        counts["declined" if out is None else "computed"] += 1
        return out

    def counted_idle(self: Any) -> None:
        counts["idle"] += 1
        idle(self)

    monkeypatch.setattr(static.StaticMixture, "forward", counted)
    monkeypatch.setattr(static.StaticMixture, "idle", counted_idle)
    return counts


@pytest.mark.parametrize("method", [None, "ngram", "eagle3"])
def test_graphs_change_no_token(
    folders: tuple[Path, Path], expected: list[list[int]], used: dict[str, int], method: str | None
) -> None:
    """Three requests in steps captured for four."""
    requests = {str(i): (2 * i, prompt) for i, prompt in enumerate(PROMPTS)}
    for graphs in (False, True):
        group = Group(folders, method, graphs, capture_sizes=(16,))
        assert list(group.serve([requests]).values()) == expected
        assert (group.full[0] > 0) == graphs
        assert used["computed"] == group.full[0]
    assert not used["declined"]


@pytest.mark.parametrize("method", [None, "ngram", "eagle3"])
def test_two_ranks_share_experts(
    folders: tuple[Path, Path], expected: list[list[int]], used: dict[str, int], method: str | None
) -> None:
    """Alone beside an idle rank, together, and uneven."""
    first, second, third = PROMPTS
    group = Group(folders, method)
    outputs = group.serve(
        [{"a": (0, first), "c": (10, third), "e": (200, second)}, {"b": (6, second), "d": (80, first)}]
    )
    assert [outputs[name] for name in "abcde"] == [expected[i] for i in (0, 1, 2, 0, 1)]
    assert all(count > 10 for count in group.full)
    assert used["computed"] == sum(group.full)
    assert used["idle"] > 10


def test_a_context_longer_than_planned_takes_the_general_path(
    folders: tuple[Path, Path], expected: list[list[int]], used: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S14: rows change over when they outgrow the plan, and come to the same tokens."""
    made = static.StaticMixture.__init__

    def shorter(self: Any, model: Any, cache: Any, limits: static.StaticLimits) -> None:
        made(self, model, cache, static.StaticLimits(limits.width, limits.max_rows, 4, limits.taps))

    monkeypatch.setattr(static.StaticMixture, "__init__", shorter)
    group = Group(folders, "ngram")
    assert group.serve([{"a": (0, PROMPTS[1])}])["a"] == expected[1]
    assert used["computed"] > 0
    assert used["declined"] > 0
    assert used["computed"] + used["declined"] == group.full[0]
