# SPDX-License-Identifier: Apache-2.0
"""The offline engine: shapes of results, stops, cuts, errors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest

from paceline import SamplingParams
from paceline.execution.kvcache import KVCache
from paceline.execution.runner import ModelExecutor
from paceline.runtime.llm import LLM

MakeLLM = Callable[..., LLM]
EOS, START, FIRST = 0, 1, 2
PIECES = [" The", " user", " is", " here", ".", " Bye"]
PROMPT = {"prompt_token_ids": [START]}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
RECITAL = {"prompt_token_ids": [*range(FIRST, FIRST + len(PIECES)), START]}
"""A prompt that holds all that will be said, so that after one token every draft is right."""


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 20} | params))


def test_a_result_has_the_shape_that_users_know(make_llm: MakeLLM) -> None:
    [result] = make_llm(PIECES).generate(PROMPT, greedy())
    assert result.finished
    assert result.prompt is None
    assert result.prompt_token_ids == (START,)
    [completion] = result.outputs
    assert completion.index == 0
    assert completion.text == " The user is here. Bye"
    assert completion.token_ids == (*range(FIRST, FIRST + 6), EOS)
    assert (completion.finish_reason, completion.stop_reason, completion.error) == ("stop", None, None)


def test_prompts_of_all_kinds_come_back_in_order(make_llm: MakeLLM) -> None:
    llm = make_llm(PIECES)
    prompts = ["<start>", PROMPT, {"prompt": "x<start>"}]
    results = llm.generate(prompts, [greedy(max_tokens=n) for n in (5, 1, 3)], use_tqdm=False)
    assert [r.prompt for r in results] == ["<start>", None, "x<start>"]
    assert [len(r.outputs[0].token_ids) for r in results] == [5, 1, 3]
    assert [r.outputs[0].finish_reason for r in results] == ["length"] * 3
    assert len({r.request_id for r in results}) == 3
    assert llm.generate("<start>", greedy())[0].outputs[0].text == " The user is here. Bye"


def test_default_parameters_are_sixteen_tokens(make_llm: MakeLLM) -> None:
    llm = make_llm([f" {i}" for i in range(40)])
    assert len(llm.generate(PROMPT, SamplingParams(temperature=0.0))[0].outputs[0].token_ids) == 16
    assert len(llm.generate(PROMPT)[0].outputs[0].token_ids) <= 16


def test_more_prompts_than_run_at_once(make_llm: MakeLLM) -> None:
    results = make_llm(PIECES, max_num_seqs=2).generate([PROMPT] * 7, greedy())
    assert [r.outputs[0].text for r in results] == [" The user is here. Bye"] * 7


def test_conversations(make_llm: MakeLLM) -> None:
    llm = make_llm(PIECES)
    one = [{"role": "user", "content": "hi"}]
    assert llm.chat(one, greedy())[0].prompt == "hi<start>"
    assert [r.prompt for r in llm.chat([one, [*one, *one]], greedy())] == ["hi<start>", "hihi<start>"]
    assert llm.chat(one, greedy())[0].outputs[0].text == " The user is here. Bye"
    with pytest.raises(ValueError, match=r"messages\[0\]\.content"):
        llm.chat([{"role": "user"}], greedy())


@pytest.mark.parametrize("speculation", [None, NGRAM])
@pytest.mark.parametrize(
    ("stop", "text", "tokens", "reason"),
    [
        (("e", "is"), " Th", 1, "e"),
        (("is",), " The user ", 3, "is"),
        (("is here", "s"), " The u", 2, "s"),
        (("ser i",), " The u", 3, "ser i"),
        ("is", " The user ", 3, "is"),
        ((". Bye",), " The user is here", 6, ". Bye"),
    ],
)
def test_stop_strings(
    make_llm: MakeLLM, speculation: dict[str, Any] | None, stop: Any, text: str, tokens: int, reason: str
) -> None:
    """Ids end with the token that completes the stop string, however many a step brought."""
    llm = make_llm(PIECES, speculative_config=speculation)
    for _ in range(2):
        [completion] = llm.generate(RECITAL, greedy(stop=stop))[0].outputs
        assert completion.text == text
        assert completion.token_ids == tuple(range(FIRST, FIRST + tokens))
        assert (completion.finish_reason, completion.stop_reason) == ("stop", reason)


@pytest.mark.parametrize("speculation", [None, NGRAM])
def test_stop_token_is_in_the_ids_and_not_in_the_text(make_llm: MakeLLM, speculation: dict[str, Any] | None) -> None:
    llm = make_llm(PIECES, speculative_config=speculation)
    [completion] = llm.generate(RECITAL, greedy(stop_token_ids=(FIRST + 2,)))[0].outputs
    assert completion.text == " The user"
    assert completion.token_ids == (FIRST, FIRST + 1, FIRST + 2)
    assert (completion.finish_reason, completion.stop_reason) == ("stop", FIRST + 2)


def test_end_of_text_can_be_ignored(make_llm: MakeLLM) -> None:
    [completion] = make_llm(["a", "b"]).generate(PROMPT, greedy(ignore_eos=True, max_tokens=5))[0].outputs
    assert completion.token_ids == (FIRST, FIRST + 1, EOS, EOS, EOS)
    assert completion.text == "ab"
    assert completion.finish_reason == "length"


def test_max_tokens_cuts_accepted_drafts(make_llm: MakeLLM) -> None:
    """All four tokens of a step are right, two are asked for."""
    llm = make_llm(PIECES, speculative_config=NGRAM)
    [completion] = llm.generate(RECITAL, greedy(max_tokens=3))[0].outputs
    assert completion.token_ids == (FIRST, FIRST + 1, FIRST + 2)
    assert completion.text == " The user is"
    assert completion.finish_reason == "length"
    assert llm.stats().num_accepted_tokens == 3
    assert llm.stats().generated_tokens == 3


@pytest.mark.parametrize("max_tokens", range(1, 7))
def test_split_characters(make_llm: MakeLLM, max_tokens: int) -> None:
    pieces = ["a", b"\xf0", b"\x9f\x98", b"\x80", b"\xc3", b"\xa9!"]
    [completion] = make_llm(pieces).generate(PROMPT, greedy(max_tokens=max_tokens))[0].outputs
    assert len(completion.token_ids) == max_tokens
    assert completion.text == ["a", "a", "a", "a😀", "a😀", "a😀é!"][max_tokens - 1]


def test_sampled_requests_repeat_by_seed_and_do_not_depend_on_their_company(make_llm: MakeLLM) -> None:
    def sample(llm: LLM, prompts: int, seed: int | None) -> list[tuple[int, ...]]:
        params = SamplingParams(temperature=40.0, max_tokens=12, seed=seed, ignore_eos=True)
        return [r.outputs[0].token_ids for r in llm.generate([PROMPT] * prompts, params)]

    llm = make_llm(PIECES)
    [alone] = sample(llm, 1, 5)
    assert sample(llm, 4, 5) == [alone] * 4
    assert sample(llm, 1, 6) != [alone]
    assert len(set(sample(llm, 4, None))) == 4
    assert sample(make_llm(PIECES, seed=3), 3, None) == sample(make_llm(PIECES, seed=3), 3, None)
    assert sample(make_llm(PIECES, seed=3), 3, None) != sample(make_llm(PIECES, seed=4), 3, None)


def test_failed_row_ends_its_own_request_only(make_llm: MakeLLM) -> None:
    poisoned = FIRST + 2
    llm = make_llm(PIECES, poison=poisoned)
    bad, good = llm.generate(
        [{"prompt_token_ids": [FIRST + 1, poisoned, 9]}, {"prompt_token_ids": [FIRST + 3]}], greedy()
    )
    assert bad.outputs[0].finish_reason == "error"
    assert "not finite" in (bad.outputs[0].error or "")
    assert bad.outputs[0].token_ids == ()
    assert good.outputs[0].text == ". Bye"
    assert good.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("prompts", "params", "named"),
    [
        ([{"prompt_token_ids": []}], None, r"prompts\[0\]: is empty"),
        ([PROMPT, {"prompt_token_ids": [1] * 32}], None, r"prompts\[1\]: 32 tokens .* max_model_len = 32"),
        ([{"prompt_token_ids": [1, -1]}], None, r"prompts\[0\]\.prompt_token_ids: -1"),
        ([{"prompt_token_ids": [10**6]}], None, "1000000"),
        ([{"prompt_token_ids": [1], "multi_modal_data": {}}], None, r"prompts\[0\]: must be"),
        ([3], None, r"prompts\[0\]: must be"),
        ([PROMPT, PROMPT], [SamplingParams()], "sampling_params: 1 for 2 prompts"),
    ],
)
def test_bad_calls_are_refused_whole(make_llm: MakeLLM, prompts: Any, params: Any, named: str) -> None:
    llm = make_llm(PIECES, max_model_len=32)
    with pytest.raises(ValueError, match=named):
        llm.generate(prompts, params)
    assert llm.stats().prompt_tokens == 0
    assert llm.generate(PROMPT, greedy())[0].outputs[0].text == " The user is here. Bye"


def test_priority_orders_admission(make_llm: MakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm = make_llm(PIECES, max_num_seqs=1, scheduling_policy="priority")
    results = llm.generate([PROMPT] * 3, greedy(), priority=[2, 0, 1])
    assert [r.outputs[0].finish_reason for r in results] == ["stop"] * 3
    with pytest.raises(ValueError, match="priority: 1 for 2 prompts"):
        llm.generate([PROMPT] * 2, greedy(), priority=[1])
    with pytest.raises(ValueError, match="needs scheduling_policy='priority'"):
        make_llm(PIECES).generate(PROMPT, greedy(), priority=[1])


def test_an_interrupted_call_leaves_a_usable_engine(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(PIECES)
    launch, launched = ModelExecutor.launch, []

    def interrupted(self: ModelExecutor, plan: Any, agreement: Any = None) -> None:
        launched.append(plan)
        if len(launched) == 3:
            raise KeyboardInterrupt
        launch(self, plan, agreement)

    monkeypatch.setattr(ModelExecutor, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT] * 2, greedy())
    assert llm.generate(PROMPT, greedy())[0].outputs[0].text == " The user is here. Bye"


@pytest.mark.parametrize("speculation", [None, NGRAM])
def test_the_cache_of_an_interrupted_call_is_gone_before_the_next_is_made(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, speculation: dict[str, Any] | None
) -> None:
    """It may take all memory there is. The interrupt comes amid a layer, out of another error."""
    llm = make_llm(PIECES, speculative_config=speculation)
    alive: list[weakref.ref[KVCache]] = []
    created, make, write = [], KVCache.__init__, KVCache.write

    def counted(self: KVCache, *args: Any) -> None:
        created.append(sum(cache() is not None for cache in alive))
        make(self, *args)

    def interrupted(self: KVCache, *args: Any) -> None:
        write(self, *args)
        alive.append(weakref.ref(self))
        if len(alive) == 3:
            try:
                raise ValueError
            except ValueError:
                raise KeyboardInterrupt from None

    monkeypatch.setattr(KVCache, "__init__", counted)
    monkeypatch.setattr(KVCache, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT] * 2, greedy())
    assert created == [0]
    assert llm.generate(PROMPT, greedy())[0].outputs[0].text == " The user is here. Bye"


def test_speculation_statistics(make_llm: MakeLLM) -> None:
    llm = make_llm(PIECES, speculative_config=NGRAM)
    assert llm.stats().num_drafts == 0
    llm.generate(RECITAL, greedy())
    stats = llm.stats()
    # " The" alone; then its three followers and "."; then " Bye", <start> and " The", of which the first is right.
    assert stats.steps == 3
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 6, 4)
    assert stats.num_accepted_tokens_per_pos == (2, 1, 1)
    assert stats.acceptance_length == 3.0
    assert stats.generated_tokens == 7
    assert stats.draft_s > 0
    assert stats.forward_s > 0


def test_prefix_cache_can_be_switched_off(make_llm: MakeLLM) -> None:
    prompt = {"prompt_token_ids": [FIRST] * 40 + [START]}
    for enabled in (True, False):
        llm = make_llm(PIECES, enable_prefix_caching=enabled)
        texts = [llm.generate(prompt, greedy())[0].outputs[0].text for _ in range(2)]
        assert texts == [" The user is here. Bye"] * 2
        assert llm.stats().prefix_hits == (32 if enabled else 0)


def test_progress_goes_to_standard_error(make_llm: MakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm = make_llm(PIECES)
    llm.generate([PROMPT] * 2, greedy())
    assert capsys.readouterr().out == ""
