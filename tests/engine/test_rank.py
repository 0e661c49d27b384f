# SPDX-License-Identifier: Apache-2.0
"""One rank on its own: phases, votes, and the refusal of what can never run."""

from __future__ import annotations

import pytest

from paceline.core.graphs import FULL, NONE
from paceline.core.request import Request, SamplingParams, StoredTokens
from paceline.core.scheduler import RequestRefused, Scheduler
from paceline.engine.rank import Rank

from .fleet import MODEL, K, ScriptedExecutor, W, config


def rank(**settings: object) -> tuple[Rank, ScriptedExecutor]:
    executor = ScriptedExecutor()
    return Rank(Scheduler(config(**settings)), executor), executor  # type: ignore[arg-type]


def request(name: str, prompt: int, max_tokens: int = 10) -> Request:
    return Request(name, StoredTokens(range(prompt)), SamplingParams(max_tokens=max_tokens))


def test_steps_of_a_rank_alone_share_no_agreement() -> None:
    r, executor = rank()
    r.add(request("r", 10))
    tokens: list[int] = []
    now = 0.0
    while r.has_work:
        now += 0.1
        for output in r.step(now):
            tokens += output.token_ids
    assert len(tokens) == 10
    assert tokens[0] == MODEL
    assert {agreement for _, agreement in executor.launched} == {None}
    assert r.step(now) == []
    launched = len(executor.launched)
    r.step(now)
    assert len(executor.launched) == launched, "without work nothing is launched"


@pytest.mark.parametrize(("method", "passes"), [("ngram", 0), ("eagle3", K), ("mtp", K), ("draft_model", K)])
def test_votes_name_sizes_shape_wish_and_drafter_passes(method: str, passes: int) -> None:
    r, _ = rank(method=method, budget=40)
    r.begin(0.0)
    vote = r.vote(7, 2)
    assert (vote.step, vote.wave, vote.tokens, vote.mode, vote.has_work, vote.draft_passes) == (7, 2, 0, NONE, False, 0)
    r.add(request("a", 30))
    r.step(0.0)
    r.add(request("b", 100))
    r.begin(0.1)
    vote = r.vote(8, 2)
    assert (vote.requests, vote.width, vote.mode, vote.draft_passes) == (2, 0, NONE, passes)
    r.launch()
    r.finish(r.collect(), 0.2)
    r.abort("b")
    r.begin(0.3)
    vote = r.vote(9, 2, stop=True)
    assert (vote.tokens, vote.requests, vote.width, vote.mode, vote.has_work) == (W, 1, W, FULL, True)
    assert vote.stop


def test_a_request_that_can_never_run_is_refused_and_leaves_no_work() -> None:
    r, _ = rank(mml=50)
    with pytest.raises(RequestRefused, match="prompt"):
        r.add(request("r", 50))
    assert not r.has_work
