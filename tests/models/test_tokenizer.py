# SPDX-License-Identifier: Apache-2.0
"""Byte-level BPE from a vocabulary and merges, and chat templates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from paceline.models.tokenizer import Tokenizer, byte_level_tokenizer

ALPHABET = sorted(ByteLevel.alphabet())
TOKENS = ["<s>", "<tool>", *ALPHABET, "th", "the", "12", "123"]
MERGES = ["t h", "th e", "1 2", "12 3"]


def make(pre: str = "gpt-2", bos: int | None = None) -> Tokenizer:
    return Tokenizer(byte_level_tokenizer(TOKENS, MERGES, pre_tokenizer=pre, special=[0], added=[1], bos=bos))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [TOKENS[i] for i in tokenizer.encode(text)]


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_text_survives_the_round_trip(text: str) -> None:
    tokenizer = make("smollm")
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("<s>", "")


def test_digits_are_cut_as_the_pre_tokenizer_says() -> None:
    assert pieces(make("gpt-2"), "1234") == ["123", "4"]
    assert pieces(make("smollm"), "1234") == ["1", "2", "3", "4"]
    assert pieces(make("llama-bpe"), "1231") == ["123", "1"]


def test_merges_apply_best_first() -> None:
    assert pieces(make(), "the th") == ["the", "Ġ", "th"]


def test_special_tokens_are_taken_whole_and_left_out_of_the_text() -> None:
    tokenizer = make()
    ids = tokenizer.encode("a<s>b<tool>")
    assert ids[1] == 0
    assert ids[-1] == 1
    assert tokenizer.decode(ids) == "ab<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<s>b<tool>"


def test_bos_is_added_when_asked_for() -> None:
    tokenizer = make(bos=0)
    assert tokenizer.encode("t")[0] == 0
    assert tokenizer.encode("t", add_special_tokens=False) == tokenizer.encode("t")[1:]


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="surrogate"):
        make().encode("a\ud800")


def test_no_chat_template_is_said() -> None:
    with pytest.raises(ValueError, match="chat_template: this model has none"):
        make().apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("message", [{"role": "user"}, {"content": "x"}, {"role": "user", "content": ["x"]}])
def test_malformed_messages_are_refused_by_field(message: dict[str, object]) -> None:
    tokenizer = Tokenizer(make().backend, chat_template="{{ messages }}")
    with pytest.raises(ValueError, match=r"messages\[1\]\.(role|content): must be a string"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}, message])


def test_template_that_rejects_a_conversation_says_why() -> None:
    tokenizer = Tokenizer(make().backend, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="roles must alternate"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_template_cannot_reach_out_of_its_sandbox() -> None:
    tokenizer = Tokenizer(make().backend, chat_template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="refuses"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
