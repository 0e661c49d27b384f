# SPDX-License-Identifier: Apache-2.0
"""Text that grows token by token, and the stop strings in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from paceline.models.tokenizer import Tokenizer, byte_level_tokenizer
from paceline.runtime.detokenizer import Detokenizer

MakeTokenizer = Callable[[Sequence[str | bytes]], Tokenizer]
BYTES = Tokenizer(byte_level_tokenizer(sorted(ByteLevel.alphabet()), [], pre_tokenizer="gpt-2"))


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=30))
def test_text_grows_by_whole_characters(text: str) -> None:
    """With one token a byte, nearly every character outside ASCII is split."""
    detokenizer = Detokenizer(BYTES)
    shown = ""
    for token in BYTES.encode(text):
        assert not detokenizer.push(token)
        assert detokenizer.text.startswith(shown)
        shown = detokenizer.text
        assert text.startswith(shown)
    detokenizer.flush()
    assert detokenizer.text == text


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_an_unfinished_character_is_not_shown(missing: int) -> None:
    detokenizer = Detokenizer(BYTES)
    for token in BYTES.encode("ok 😀")[:-missing]:
        detokenizer.push(token)
    detokenizer.flush()
    assert detokenizer.text == "ok "


def test_a_replacement_character_that_was_said_stays(make_tokenizer: MakeTokenizer) -> None:
    detokenizer = Detokenizer(make_tokenizer(["a", "\ufffd", "b"]))
    for token in (2, 3, 4):
        detokenizer.push(token)
    assert detokenizer.text == "a\ufffdb"


def test_special_tokens_have_no_text(make_tokenizer: MakeTokenizer) -> None:
    detokenizer = Detokenizer(make_tokenizer(["a", "b"]))
    for token in (2, 1, 0, 3):
        detokenizer.push(token)
    assert detokenizer.text == "ab"


def said(tokenizer: Tokenizer, stop: Sequence[str], tokens: Sequence[int]) -> tuple[str, str | None, int]:
    """The text, the stop string, and how many tokens it took."""
    detokenizer = Detokenizer(tokenizer, stop)
    for i, token in enumerate(tokens):
        if detokenizer.push(token):
            return detokenizer.text, detokenizer.stop_reason, i + 1
    detokenizer.flush()
    return detokenizer.text, detokenizer.stop_reason, len(tokens)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["a", "is"], (" The user ", "is", 1)),  # the earliest place, not the first in the list
        (["is", "user"], (" The ", "user", 1)),
        (["us", "user"], (" The ", "us", 1)),  # at the same place the first in the list
        (["zzz"], (" The user is", None, 3)),
        (["is there"], (" The user ", "is there", 2)),  # over two tokens
        (["s th", "user is there"], (" The ", "user is there", 2)),
    ],
)
def test_the_earliest_stop_string_wins(
    make_tokenizer: MakeTokenizer, stop: list[str], expected: tuple[str, str | None, int]
) -> None:
    tokenizer = make_tokenizer([" The user is", " there", "."])
    text, reason, count = said(tokenizer, stop, (2, 3, 4))
    if expected[1] is None:
        assert (text, reason, count) == (" The user is there.", None, 3)
    else:
        assert (text, reason, count) == expected


def test_tokens_are_taken_one_at_a_time(make_tokenizer: MakeTokenizer) -> None:
    """The stop string that is complete first ends the text, though a longer one would begin earlier."""
    tokenizer = make_tokenizer(["ab", "cd"])
    assert said(tokenizer, ["abc", "b"], (2, 3)) == ("a", "b", 1)


def test_stop_string_of_a_split_character(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(["x", b"\xf0\x9f", b"\x98\x80", "y"])
    assert said(tokenizer, ["😀"], (2, 3, 4, 5)) == ("x", "😀", 3)


@given(st.lists(st.sampled_from("abc"), max_size=12), st.lists(st.text("abc", min_size=1, max_size=3), max_size=3))
def test_equals_stopping_at_the_first_prefix_with_a_stop_string(letters: list[str], stop: list[str]) -> None:
    text = "".join(letters)
    expected = text
    for end in range(len(text) + 1):
        places = [at for s in stop if (at := text[:end].find(s)) >= 0]
        if places:
            expected = text[: min(places)]
            break
    assert said(BYTES, stop, BYTES.encode(text))[0] == expected
