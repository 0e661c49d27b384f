# SPDX-License-Identifier: Apache-2.0
"""The executor, driven by hand-made plans: the same tokens however a sequence is cut, batched or interrupted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.core.config import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    GroupConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from paceline.core.plan import BlockUpdate, Row, StepPlan
from paceline.execution.runner import ModelExecutor
from paceline.execution.sequence import PlanMismatch
from paceline.models.llama import Llama

PROMPT = [(5 * i * i + 3) % 64 for i in range(30)]
OTHER = [(3 * i + 1) % 64 for i in range(11)]
COUNT = 12
MakeDriver = Callable[..., Any]


def plain(make_driver: MakeDriver, prompt: list[int] = PROMPT, **params: Any) -> list[int]:
    """The tokens of a sequence that is alone and undisturbed."""
    driver = make_driver()
    driver.add(0, prompt, **params)
    tokens: list[int] = driver.generate(0, len(prompt), COUNT)
    return tokens


SAMPLING: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 11}]


@pytest.mark.parametrize("params", SAMPLING, ids=["greedy", "sampled"])
@pytest.mark.parametrize("chunk", [1, 3, 7, 29])
def test_prompt_in_chunks(make_driver: MakeDriver, params: dict[str, Any], chunk: int) -> None:
    driver = make_driver()
    driver.add(0, PROMPT, **params)
    for start in range(0, len(PROMPT), chunk):
        n = min(chunk, len(PROMPT) - start)
        last = start + n == len(PROMPT)
        result = driver.run(Row(0, start, n, (), last))
        assert len(result.sampled[0]) == last
    tokens = list(result.sampled[0])
    while len(tokens) < COUNT:
        tokens += driver.run(Row(0, len(PROMPT) + len(tokens) - 1, 1, (), True)).sampled[0]
    assert tokens == plain(make_driver, **params)


@pytest.mark.parametrize("params", SAMPLING, ids=["greedy", "sampled"])
def test_batch_composition(make_driver: MakeDriver, params: dict[str, Any]) -> None:
    """One sequence decodes while others are prefilled, decode beside it in another order, and leave."""
    driver = make_driver()
    driver.add(0, PROMPT, **params)
    tokens = list(driver.run(Row(0, 0, len(PROMPT), (), True)).sampled[0])
    others: dict[int, int] = {}
    for seq in range(1, COUNT):
        driver.add(seq, OTHER[seq % 3 :])
        leaving = others.pop(seq - 3, None)
        rows = [Row(s, length, 1, (), True) for s, length in others.items()]
        others = {s: length + 1 for s, length in others.items()}
        others[seq] = len(OTHER) - seq % 3
        rows.append(Row(seq, 0, others[seq], (), True))
        place = seq % len(rows)
        rows.insert(place, Row(0, len(PROMPT) + len(tokens) - 1, 1, (), True))
        result = driver.run(*rows, retired=[] if leaving is None else [seq - 3])
        tokens += result.sampled[place]
    assert tokens == plain(make_driver, **params)


@pytest.mark.parametrize("params", SAMPLING, ids=["greedy", "sampled"])
@pytest.mark.parametrize("kept", [0, 8])
def test_preempted_sequence_is_computed_again(make_driver: MakeDriver, params: dict[str, Any], kept: int) -> None:
    """It comes back with other blocks, of which ``kept`` tokens are still right, in two chunks."""
    driver = make_driver()
    blocks = driver.add(0, PROMPT, **params)
    tokens = driver.generate(0, len(PROMPT), 5)
    driver.add(1, OTHER)
    driver.run(Row(1, 0, len(OTHER), (), True))
    total = len(PROMPT) + len(tokens)
    driver.blocks.append(BlockUpdate(0, 0, True, blocks[: kept // 4]))
    driver.assign(0, total + 32 - kept, replace=False)
    assert driver.run(Row(0, kept, 10, (), False)).sampled == [()]
    tokens += driver.run(Row(0, kept + 10, total - kept - 10, (), True)).sampled[0]
    while len(tokens) < COUNT:
        tokens += driver.run(Row(0, len(PROMPT) + len(tokens) - 1, 1, (), True)).sampled[0]
    assert tokens == plain(make_driver, **params)


def test_token_that_was_never_committed_is_forgotten(make_driver: MakeDriver) -> None:
    """The scheduler may make a sequence start over in the step that sampled a token for it."""
    driver = make_driver()
    driver.add(0, PROMPT)
    tokens = driver.generate(0, len(PROMPT), 5)
    driver.run(Row(0, len(PROMPT) + 4, 1, (), True))
    driver.assign(0, 64)
    tokens += driver.run(Row(0, 0, len(PROMPT) + 5, (), True)).sampled[0]
    while len(tokens) < COUNT:
        tokens += driver.run(Row(0, len(PROMPT) + len(tokens) - 1, 1, (), True)).sampled[0]
    assert tokens == plain(make_driver)


def test_blocks_written_in_the_same_step_can_be_hit(make_driver: MakeDriver) -> None:
    driver = make_driver()
    shared = driver.add(0, PROMPT)[:5]
    driver.add(1, PROMPT)
    driver.blocks[-1] = BlockUpdate(1, 0, True, shared + list(driver.blocks[-1].blocks)[5:])
    result = driver.run(Row(1, 20, len(PROMPT) - 20, (), True), Row(0, 0, len(PROMPT), (), True))
    assert result.sampled[0] == result.sampled[1] == tuple(plain(make_driver)[:1])


@pytest.mark.parametrize("wrong", [False, True])
def test_drafts_are_verified_and_rejected_ones_leave_no_trace(make_driver: MakeDriver, wrong: bool) -> None:
    expected = plain(make_driver)
    driver = make_driver(num_speculative_tokens=3)
    driver.add(0, PROMPT)
    tokens = list(driver.run(Row(0, 0, len(PROMPT), (), True)).sampled[0])
    while len(tokens) < COUNT - 3:
        right = expected[len(tokens) : len(tokens) + 3]
        drafts = (right[0], (right[1] + wrong) % 64, right[2])
        sampled = driver.run(Row(0, len(PROMPT) + len(tokens) - 1, 4, drafts, True)).sampled[0]
        assert len(sampled) == (2 if wrong else 4)
        tokens += sampled
    assert tokens == expected[: len(tokens)]


@pytest.mark.parametrize("params", SAMPLING, ids=["greedy", "sampled"])
@pytest.mark.parametrize("rates", [None, (1.0, 1.0, 1.0)], ids=["standard", "synthetic"])
def test_placeholder_drafts_change_nothing(
    make_driver: MakeDriver, params: dict[str, Any], rates: tuple[float, ...] | None
) -> None:
    """Rows of one known token and three placeholders yield what unpadded rows would, one token at a time."""
    expected = plain(make_driver, **params)
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates} if rates else {}
    driver = make_driver(num_speculative_tokens=3, **synthetic)
    driver.add(0, PROMPT, **params)
    tokens = list(driver.run(Row(0, 0, len(PROMPT), (), True)).sampled[0])
    while len(tokens) < COUNT:
        sampled = driver.run(Row(0, len(PROMPT) + len(tokens) - 1, 4, (-1, -1, -1), True)).sampled[0]
        assert len(sampled) == 1
        tokens += sampled
    assert tokens == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_placeholders_with_a_model_that_always_says_token_0(
    make_driver: MakeDriver, make_model: Callable[..., Llama], temperature: float
) -> None:
    """Row 0 of the head is the only one that is not zero, and large whatever the hidden state's sign."""

    def only_first(weight: torch.Tensor) -> torch.Tensor:
        head = torch.zeros_like(weight)
        head[0] = 1.0
        return head

    # The hidden state is all ones: every embedding is, and no layer adds anything.
    model = make_model(
        lm_head=lambda w: only_first(w) * 100, embed_tokens=torch.ones_like, o_proj=torch.zeros_like,
        down_proj=torch.zeros_like,
    )  # fmt: skip
    driver = make_driver(model=model, num_speculative_tokens=3)
    driver.add(0, OTHER, temperature=temperature, seed=3)
    driver.run(Row(0, 0, len(OTHER), (), True))
    assert driver.run(Row(0, len(OTHER), 4, (-1, -1, -1), True)).sampled[0] == (0,)
    assert driver.run(Row(0, len(OTHER) + 1, 4, (0, 0, -1), True)).sampled[0] == (0, 0, 0)


def test_synthetic_rates_of_one_accept_all_real_drafts(make_driver: MakeDriver) -> None:
    driver = make_driver(
        num_speculative_tokens=3,
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=(1.0, 1.0, 1.0),
    )
    driver.add(0, PROMPT)
    driver.run(Row(0, 0, len(PROMPT), (), True))
    assert driver.run(Row(0, len(PROMPT), 4, (9, 8, 7), True)).sampled[0][:3] == (9, 8, 7)
    assert driver.run(Row(0, len(PROMPT) + 4, 4, (9, -1, -1), True)).sampled[0][:1] == (9,)


def test_drafts_are_proposed_for_rows_that_sampled(make_driver: MakeDriver) -> None:
    driver = make_driver(num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3)
    prompt = list(range(64)) * 2  # whatever is sampled occurred before
    driver.add(0, prompt)
    driver.add(1, prompt)
    result = driver.run(Row(0, 0, len(prompt), (), True), Row(1, 0, 10, (), False))
    token = result.sampled[0][0]
    follow = (prompt[prompt.index(token) + 1 :])[:3]
    assert result.next_drafts[0] == tuple(follow)
    assert result.next_drafts[1] == ()
    assert result.draft_s > 0
    assert result.forward_s > 0


def test_unseeded_requests_differ_and_follow_the_executors_seed(make_driver: MakeDriver) -> None:
    def sampled(seed: int, seq: int) -> list[int]:
        driver = make_driver(seed=seed)
        driver.add(seq, PROMPT, temperature=2.0)
        tokens: list[int] = driver.generate(seq, len(PROMPT), COUNT)
        return tokens

    assert sampled(1, 0) == sampled(1, 0)
    assert sampled(1, 0) != sampled(1, 1)
    assert sampled(1, 0) != sampled(2, 0)


POISON = 63


def poisonous(weight: torch.Tensor) -> torch.Tensor:
    """An embedding that is not finite for one token."""
    weight = weight.clone()
    weight[POISON] = float("nan")
    return weight


@pytest.mark.parametrize("samples", [True, False])
def test_row_that_is_not_finite_is_an_error_of_its_own(
    make_driver: MakeDriver, make_model: Callable[..., Llama], samples: bool
) -> None:
    model = make_model(embed_tokens=poisonous)
    prompt = [i % 60 for i in range(20)]
    driver = make_driver(model=model)
    driver.add(0, prompt)
    expected = driver.generate(0, len(prompt), 3)

    driver = make_driver(model=model)
    driver.add(0, prompt)
    blocks = driver.add(1, [1, 2, POISON, 4, 5])
    result = driver.run(Row(0, 0, len(prompt), (), True), Row(1, 0, 5 if samples else 4, (), samples))
    assert result.sampled[1] == ()
    assert list(result.errors) == [1]
    assert "not finite" in result.errors[1]
    # Its blocks go to another sequence, whose first use of them reads past its own tokens.
    driver.first, driver.blocks = [], []
    driver.add(2, prompt, room=0)
    driver.blocks[-1] = BlockUpdate(2, 0, True, blocks[:6])
    again = driver.run(Row(2, 0, len(prompt), (), True), Row(0, len(prompt), 1, (), True), retired=[1])
    assert [*result.sampled[0], *again.sampled[1]] == expected[:2]
    assert again.sampled[0] == tuple(expected[:1])


def test_unfit_plans_are_refused(make_driver: MakeDriver) -> None:
    def fresh() -> Any:
        driver = make_driver()
        driver.add(0, PROMPT, room=2)
        return driver

    with pytest.raises(PlanMismatch, match="sequence 5 is unknown"):
        fresh().run(Row(5, 0, 1, (), True))
    with pytest.raises(PlanMismatch, match=r"positions \[0, 31\) of 30 tokens"):
        fresh().run(Row(0, 0, 31, (), True))
    driver = fresh()
    driver.run(Row(0, 0, 30, (), True))
    with pytest.raises(PlanMismatch, match="positions up to 34 in 8 blocks of 4 tokens"):
        driver.run(Row(0, 30, 4, (1, 2, 3), True))
    driver = fresh()
    with pytest.raises(PlanMismatch, match="no connector"):
        driver.executor.launch(StepPlan(0, (), 0, 0, load_meta={"x": 1}))
    driver.executor.launch(StepPlan(0, (), 0, 0))
    with pytest.raises(PlanMismatch, match="uncollected"):
        driver.executor.launch(StepPlan(1, (), 0, 0))
    assert driver.executor.collect().sampled == ()
    with pytest.raises(PlanMismatch, match="no step was launched"):
        driver.executor.collect()


def test_retired_sequences_are_forgotten(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add(0, PROMPT)
    driver.run(Row(0, 0, 30, (), True))
    driver.run(retired=[0])
    with pytest.raises(PlanMismatch, match="sequence 0 is unknown"):
        driver.run(Row(0, 30, 1, (), True))


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"speculation": SpeculationConfig(method="mtp", num_speculative_tokens=3)}, "speculation.method"),
        (
            {"cache": CacheConfig(num_blocks=100, groups=(GroupConfig(kind="sliding", sliding_window=8),))},
            "cache.groups",
        ),
        ({"scheduler": SchedulerConfig(max_model_len=1024)}, "scheduler.max_model_len"),
    ],
)
def test_configuration_that_cannot_be_honoured_is_refused(model: Llama, parts: dict[str, Any], named: str) -> None:
    defaults = {"scheduler": SchedulerConfig(max_model_len=256), "cache": CacheConfig(num_blocks=100)}
    with pytest.raises(ConfigError) as refused:
        ModelExecutor(model, EngineConfig(**(defaults | parts)))
    assert refused.value.field == named
