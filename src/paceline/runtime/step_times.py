# SPDX-License-Identifier: Apache-2.0
"""A rank that measures decode steps: the program that `paceline bench graphs` runs, once per rank.

It reads a JSON object: ``model`` (a folder), ``sizes`` (tokens of a step), ``width`` (tokens of a row), ``context``
(tokens before each row), ``warm_ups``, ``steps``, ``ranks``, its ``rank``, and ``store``, the file in which the ranks
meet; without one this rank is alone, and what others would bring is imitated. It writes lines of JSON: ``done``, pairs
of steps so far, and for each size ``tokens``, ``general_s`` and ``static_s``, seconds of each step.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import Any

import numpy as np
from torch import Tensor

from paceline.core.config import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    GraphConfig,
    SchedulerConfig,
    SpeculationConfig,
    require,
)
from paceline.core.graphs import FULL, NONE
from paceline.core.lockstep import RUN, Agreement
from paceline.core.plan import BlockUpdate, NewSequence, Row, StepPlan
from paceline.core.request import SamplingParams, StoredTokens
from paceline.engine.collector import collector_paused
from paceline.engine.line import PeerLost
from paceline.execution.runner import ModelExecutor
from paceline.models.experts import ExpertExchange, Placement, Routed
from paceline.models.kernels import Array
from paceline.models.planned import Tokens
from paceline.models.registry import load_model
from paceline.models.static import StaticMixture
from paceline.parallel.exchange import connect
from paceline.parallel.rendezvous import Meeting, Place

BLOCK_SIZE = 16
TIMEOUT_S = 60.0
"""How long ranks wait for each other in a step."""


class ImitatedRanks:
    """An exchange on one rank, to which its own tokens come as often as there are ranks: others that bring the like.

    ``spent_s``: time that this took.
    """

    rank = 0

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.inert: Tensor | None = None
        self.spent_s = 0.0

    def begin(self, mode: int, size: int, inert: Tensor | None = None) -> None:
        """See `ExpertExchange`."""
        self.inert = inert

    def dispatch(self, tokens: Routed, placement: Placement) -> Routed:
        """See `ExpertExchange`."""
        began = perf_counter()
        parts = (tokens.hidden, tokens.experts, tokens.weights)
        arrived = Routed(*(part.repeat(self.ranks, 1) for part in parts))
        self.spent_s += perf_counter() - began
        return arrived

    def combine(self, partial: Tensor) -> Tensor:
        """See `ExpertExchange`; what other ranks would add is left out."""
        return partial[: len(partial) // self.ranks]

    def plan(self, tokens: int, hidden_size: int, placement: Placement, top_k: int) -> PlannedImitation:
        """See `PlansExchange`."""
        return PlannedImitation(self)


class PlannedImitation:
    """See `PlannedExchange`: `ImitatedRanks`."""

    def __init__(self, imitated: ImitatedRanks) -> None:
        self._imitated = imitated

    def dispatch(self, tokens: Tokens) -> Tokens:
        """See `PlannedExchange`."""
        began = perf_counter()
        hidden, experts, weights = (np.concatenate([part] * self._imitated.ranks) for part in tokens)
        self._imitated.spent_s += perf_counter() - began
        return hidden, experts, weights

    def combine(self, partial: Array) -> Array:
        """See `PlannedExchange`."""
        return partial[: len(partial) // self._imitated.ranks]


class MeasuredRank:
    """An executor with sequences in its cache, whose last W tokens it computes again and again."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        """Load the model, as a rank does that shares its experts with others, and compute the contexts.

        Raises:
            ConfigError: the model has no static backend.
            UnsupportedModel: it cannot be found or run.
            PeerLost: another rank did not come.
        """
        self._imitated: ImitatedRanks | None = None
        exchange: ExpertExchange
        if spec["store"] is None:
            exchange = self._imitated = ImitatedRanks(spec["ranks"])
        else:
            place = Place(size=spec["ranks"], rank=spec["rank"], store=spec["store"], inbox="", timeout_s=TIMEOUT_S)
            self._meeting = Meeting(place)
            exchange = connect(TIMEOUT_S)
        model = load_model(spec["model"], quantization="int8", parallel=exchange).model
        require(StaticMixture.supports(model), "model", "has no static backend, which mixtures of experts have in int8")
        self._width, self._context, self._ranks = spec["width"], spec["context"], spec["ranks"]
        self._step = 0
        self._rows = max(spec["sizes"]) // self._width
        length = self._context + self._width
        blocks = -(-(length + self._width + 1) // BLOCK_SIZE)
        drafts = self._width - 1
        config = EngineConfig(
            scheduler=SchedulerConfig(max_num_seqs=self._rows, max_model_len=length + 1),
            cache=CacheConfig(num_blocks=1 + blocks * self._rows, block_size=BLOCK_SIZE, enable_prefix_caching=False),
            speculation=SpeculationConfig(method="ngram" if drafts else None, num_speculative_tokens=drafts),
            graphs=GraphConfig(mode="FULL_DECODE_ONLY"),
        )
        self._executor = ModelExecutor(model, config)
        draw = random.Random(spec["rank"])
        for i in range(self._rows):
            prompt = StoredTokens([draw.randrange(model.config.vocab_size) for _ in range(length)])
            self._run(
                NONE,
                [Row(i, 0, self._context, (), False)],
                [NewSequence(i, str(i), prompt, SamplingParams())],
                [BlockUpdate(i, 0, True, range(1 + i * blocks, 1 + (i + 1) * blocks))],
            )

    def step_s(self, mode: int, tokens: int) -> float:
        """Seconds of a decode step, from the plan to hidden states, without the time of an imitated exchange.

        Its rows do not sample: they stay what they are, so that all steps of one size compute the same.
        """
        rows = [Row(i, self._context, self._width, (), False) for i in range(tokens // self._width)]
        return self._run(mode, rows)

    def _run(self, mode: int, rows: list[Row], first: Any = (), blocks: Any = ()) -> float:
        tokens = sum(row.n for row in rows)
        plan = StepPlan(self._step, rows, tokens, rows[0].n, first, blocks)
        agreed = Agreement(self._step, RUN, mode, tokens if mode == FULL else 0, (tokens,) * self._ranks, 0, stop=False)
        self._step += 1
        before = 0.0 if self._imitated is None else self._imitated.spent_s
        self._executor.launch(plan, agreed)
        result = self._executor.collect()
        if result.errors:
            raise RuntimeError(f"a step failed: {result.errors}")
        return result.forward_s - (0.0 if self._imitated is None else self._imitated.spent_s - before)


def measure(spec: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What the program writes."""
    rank = MeasuredRank(spec)
    done = 0
    for tokens in spec["sizes"]:
        times: dict[int, list[float]] = {FULL: [], NONE: []}
        for i in range(spec["warm_ups"] + spec["steps"]):
            # Neither always follows the other.
            for mode in (FULL, NONE) if i % 2 else (NONE, FULL):
                took = rank.step_s(mode, tokens)
                if i >= spec["warm_ups"]:
                    times[mode].append(took)
            done += 1
            yield {"done": done}
        yield {"tokens": tokens, "general_s": times[NONE], "static_s": times[FULL]}


def main() -> int:
    """The program; its exit status."""
    try:
        with collector_paused():
            for told in measure(json.load(sys.stdin)):
                print(json.dumps(told), flush=True)
    except (ConfigError, PeerLost, ValueError, OSError, ImportError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
