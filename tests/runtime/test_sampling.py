# SPDX-License-Identifier: Apache-2.0
"""Sampling options of the offline engine: what users ask for and what they get back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline import SamplingParams
from paceline.runtime.llm import LLM
from paceline.runtime.outputs import CompletionOutput

MakeLLM = Callable[..., LLM]
EOS, START, FIRST = 0, 1, 2
PIECES = [" The", " user", " is", " here", ".", " Bye"]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
RECITAL = {"prompt_token_ids": [*range(FIRST, FIRST + len(PIECES)), START]}
"""A prompt that holds all that will be said, so that after one token every draft is right."""
SPECULATION = pytest.mark.parametrize("speculation", [None, NGRAM], ids=["plain", "ngram"])


def complete(llm: LLM, **params: Any) -> CompletionOutput:
    [result] = llm.generate(RECITAL, SamplingParams(**({"temperature": 0.0, "max_tokens": 20} | params)))
    return result.outputs[0]


@SPECULATION
def test_min_tokens_put_the_end_off(make_llm: MakeLLM, speculation: dict[str, Any] | None) -> None:
    """Where the model would end, the next best token begins the recital again."""
    llm = make_llm(PIECES, speculative_config=speculation)
    once = [*range(FIRST, FIRST + 6)]
    assert complete(llm, min_tokens=6).token_ids == (*once, EOS)
    again = complete(llm, min_tokens=7)
    assert again.token_ids == (*once, START, *once, EOS)
    assert again.finish_reason == "stop"
    assert complete(llm, min_tokens=7, ignore_eos=True, max_tokens=8).token_ids == (*once, EOS, EOS)


@SPECULATION
def test_min_tokens_put_stop_ids_and_stop_strings_off(make_llm: MakeLLM, speculation: dict[str, Any] | None) -> None:
    llm = make_llm(PIECES, speculative_config=speculation)
    stopped = complete(llm, min_tokens=2, stop_token_ids=(FIRST + 1, FIRST + 3))
    assert FIRST + 1 not in stopped.token_ids[:2]
    assert len(stopped.token_ids) > 2
    assert complete(llm, min_tokens=0, stop="e").token_ids == (FIRST,)
    held = complete(llm, min_tokens=3, stop="e")
    assert held.text == " The user is h"
    assert held.stop_reason == "e"


@SPECULATION
@pytest.mark.parametrize(
    ("params", "count"),
    [({"max_tokens": 2}, 2), ({"stop": "is"}, 3), ({"stop_token_ids": (FIRST + 3,)}, 4), ({}, 7)],
    ids=["max_tokens", "stop", "stop_token_ids", "eos"],
)
def test_log_probabilities_are_cut_where_the_ids_are(
    make_llm: MakeLLM, speculation: dict[str, Any] | None, params: dict[str, Any], count: int
) -> None:
    llm = make_llm(PIECES, speculative_config=speculation)
    completion = complete(llm, logprobs=2, **params)
    assert len(completion.token_ids) == count
    assert completion.logprobs is not None
    assert [next(iter(entry)) for entry in completion.logprobs] == list(completion.token_ids)
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        best = entry[token]
        assert best.rank == 1
        assert best.decoded_token == ([*PIECES][token - FIRST] if token else "<eos>")
        assert best.logprob == max(alternative.logprob for alternative in entry.values())
        assert len(entry) == 2
    chosen = [entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(chosen))
    if speculation and count > 2:
        assert llm.stats().num_accepted_tokens > 0


def test_log_probabilities_only_for_who_asked(make_llm: MakeLLM) -> None:
    llm = make_llm(PIECES)
    none, zero = llm.generate(
        [RECITAL, RECITAL], [SamplingParams(temperature=0.0, logprobs=n, max_tokens=3) for n in (None, 0)]
    )
    assert none.outputs[0].logprobs is None
    assert none.outputs[0].cumulative_logprob is None
    assert zero.outputs[0].logprobs is not None
    assert [list(entry) for entry in zero.outputs[0].logprobs] == [[FIRST + i] for i in range(3)]


@SPECULATION
def test_penalties_and_biases_change_greedy_choices(make_llm: MakeLLM, speculation: dict[str, Any] | None) -> None:
    """All of the recital is in the prompt, the end of text is not."""
    llm = make_llm(PIECES, speculative_config=speculation)
    assert complete(llm, repetition_penalty=50.0, max_tokens=1).token_ids == (EOS,)
    assert complete(llm, logit_bias={FIRST + 4: 100.0}, max_tokens=3).token_ids == (FIRST + 4,) * 3
    # It is said until it has been penalised below what follows it.
    penalised = complete(llm, logit_bias={FIRST + 4: 39.0}, frequency_penalty=2.0, max_tokens=5)
    assert penalised.token_ids == (*(FIRST + 4,) * 4, FIRST + 5)


def test_narrow_filters_make_a_hot_request_greedy(make_llm: MakeLLM) -> None:
    llm = make_llm(PIECES)
    said = (*range(FIRST, FIRST + 6), EOS)
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert complete(llm, temperature=1.5, seed=3, **narrow).token_ids == said
    assert complete(llm, temperature=5.0, seed=3).token_ids != said


@SPECULATION
def test_results_do_not_depend_on_company(make_llm: MakeLLM, speculation: dict[str, Any] | None) -> None:
    options = [
        {"top_p": 0.9, "presence_penalty": 1.5},
        {"top_k": 40, "frequency_penalty": 0.7, "logprobs": 3},
        {"min_p": 0.01, "repetition_penalty": 1.2, "min_tokens": 5},
        {},
    ]
    params = [SamplingParams(temperature=2.0, max_tokens=12, seed=i, **o) for i, o in enumerate(options)]
    together = make_llm(PIECES, speculative_config=speculation).generate([RECITAL] * 4, params)
    llm = make_llm(PIECES, speculative_config=speculation, max_num_batched_tokens=5)
    for given, result in zip(params, together, strict=True):
        [alone] = llm.generate(RECITAL, given)
        assert alone.outputs == result.outputs


def test_bias_of_an_unknown_id_is_refused_before_anything_runs(make_llm: MakeLLM) -> None:
    llm = make_llm(PIECES)
    with pytest.raises(ValueError, match=r"sampling_params\.logit_bias: 999999 is not an id below"):
        llm.generate(RECITAL, SamplingParams(logit_bias={999999: 1.0}))
    assert llm.stats().steps == 0
