# SPDX-License-Identifier: Apache-2.0
"""Requests and token sources: prompts are never walked by the scheduler, and equal content has equal block keys."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.request import (
    GeneratedTokens,
    Request,
    SamplingParams,
    StoredTokens,
    TokenSource,
    TraceTokens,
    chain_hash,
)
from paceline.core.scheduler import RequestRefused

from .driving import Drive, Offers, engine_config


class Unreadable:
    """A prompt that fails whoever reads it; block keys come from a source that can name them without reading."""

    def __init__(self, source: TokenSource) -> None:
        self._source = source
        self.length = source.length

    def tokens(self, start: int, stop: int) -> Sequence[int]:
        raise AssertionError("a scheduler walked prompt tokens")

    def block_key(self, index: int, block_size: int) -> bytes:
        return self._source.block_key(index, block_size)


class Unnamed(Unreadable):
    """Not even its blocks can be named."""

    def __init__(self, length: int) -> None:
        self.length = length

    def block_key(self, index: int, block_size: int) -> bytes:
        raise AssertionError("a scheduler hashed a block though nothing is cached")


def life(d: Drive, source: TokenSource) -> None:
    """Prefill in chunks, decode across a block boundary, preempt, resume, end."""
    d.add("r", source, max_tokens=40)
    d.add("s", source, max_tokens=40)
    d.run(lambda: len(d.tokens["s"]) > 25, accept=1)
    d.s.preempt("s")
    d.run(accept=2)
    assert d.ended == {"r": "length", "s": "length"}


@pytest.mark.parametrize("K", [0, 3])
@pytest.mark.parametrize("connector", [None, "mock"])
def test_with_prefix_caching_off_nothing_is_read_and_nothing_hashed(connector: str | None, K: int) -> None:
    mock = Offers({"r": 90, "s": 30}) if connector else None
    life(Drive(engine_config(K=K, caching=False, budget=32), mock), Unnamed(100))


@pytest.mark.parametrize("K", [0, 3])
@pytest.mark.parametrize(
    "source", [GeneratedTokens(96, 5, 1000), TraceTokens(96, [4, 9], 48, 1000), TraceTokens(96, range(6), 16, 1000)]
)
def test_with_prefix_caching_on_generated_and_traced_prompts_are_named_not_read(source: TokenSource, K: int) -> None:
    life(Drive(engine_config(K=K, budget=32)), Unreadable(source))


def request(source: TokenSource, **more: object) -> Request:
    return Request("r", source, SamplingParams(), **more)  # type: ignore[arg-type]


sources = st.one_of(
    st.lists(st.integers(0, 50), min_size=1, max_size=70).map(StoredTokens),
    st.builds(GeneratedTokens, st.integers(1, 70), st.integers(0, 200), st.sampled_from([7, 64, 1000])),
    st.integers(1, 70).flatmap(
        lambda n: st.builds(
            TraceTokens, st.just(n), st.lists(st.integers(0, 9), min_size=70, max_size=70), st.sampled_from([1, 8, 12]),
            st.just(997),
        )
    ),
)  # fmt: skip


@given(sources, st.integers(0, 80), st.integers(0, 80))
def test_a_slice_of_a_source_is_that_of_its_whole(source: TokenSource, start: int, stop: int) -> None:
    whole = list(source.tokens(0, source.length))
    assert len(whole) == source.length
    assert list(source.tokens(start, stop)) == whole[start:stop]


@given(sources, st.data())
def test_block_keys_are_equal_where_the_content_is_and_only_there(source: TokenSource, data: st.DataObject) -> None:
    bs = data.draw(st.sampled_from([1, 4, 8, 16]))
    full = source.length // bs
    keys = [source.block_key(i, bs) for i in range(full)]
    contents = [tuple(source.tokens(i * bs, (i + 1) * bs)) for i in range(full)]
    for i in range(full):
        for j in range(i):
            if isinstance(source, TraceTokens) and contents[i] == contents[j]:
                continue  # a trace names content by its hash ids: two ids may stand for tokens that happen to be equal
            assert (keys[i] == keys[j]) == (contents[i] == contents[j])


def test_generated_prompts_of_one_benchmark_share_blocks_where_their_tokens_agree() -> None:
    one, other = GeneratedTokens(64, 100, 5000), GeneratedTokens(80, 116, 5000)
    assert one.block_key(1, 16) == other.block_key(0, 16)
    assert one.block_key(0, 16) != other.block_key(0, 16)
    assert GeneratedTokens(64, 5, 10).block_key(0, 16) == GeneratedTokens(64, 15, 10).block_key(0, 16)


def test_a_hash_covers_everything_before_it() -> None:
    a, b = request(StoredTokens([1, 2, 3, 4, 9, 9])), request(StoredTokens([1, 2, 7, 4, 9, 9]))
    one, other = a.block_hashes(3, 2), b.block_hashes(3, 2)
    assert one[0] == other[0]
    assert one[1] != other[1]
    assert one[2] != other[2], "equal content behind a difference"
    assert a.block_hashes(1, 2) == one, "asking for fewer computes nothing anew"
    assert one[1] == chain_hash(one[0], a.source.block_key(1, 2))


def test_outputs_are_hashed_like_a_prompt_that_holds_them() -> None:
    a = request(StoredTokens([1, 2, 3]))
    a.output.extend([4, 5, 6])
    a.num_tokens += 3
    assert a.block_hashes(3, 2) == request(StoredTokens([1, 2, 3, 4, 5, 6])).block_hashes(3, 2)
    assert a.tokens(1, 5) == [2, 3, 4, 5]
    assert a.tokens(3, 6) == [4, 5, 6]
    assert a.tokens(0, 2) == [1, 2]


@pytest.mark.parametrize("salts", [("x", "y"), ("x", None), (None, "x")])
def test_a_cache_salt_separates_equal_prompts(salts: tuple[str | None, str | None]) -> None:
    d = Drive(engine_config())
    prompt = range(48)
    d.add("one", prompt, cache_salt=salts[0])
    d.step()
    d.add("other", prompt, cache_salt=salts[1])
    d.add("same", prompt, cache_salt=salts[0])
    rows = d.step()
    assert (rows["other"].start, rows["same"].start) == (0, 32)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"stop": ("a", "")}, "stop"),
    ],
)
def test_sampling_parameters_that_cannot_be_honoured_are_refused_by_name(params: dict[str, object], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        SamplingParams(**params)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [0, 64, 100])
def test_a_prompt_that_is_empty_or_leaves_no_room_for_output_is_refused(length: int) -> None:
    d = Drive(engine_config(mml=64))
    with pytest.raises(RequestRefused, match="prompt: "):
        d.add("r", length)
    assert not d.s.has_work
    d.add("r", 63)
    d.run()
    assert d.ended == {"r": "length"}
    assert len(d.tokens["r"]) == 1


def test_an_id_in_use_is_refused_and_free_again_when_its_request_has_ended() -> None:
    d = Drive(engine_config())
    first = d.add("r", 5, max_tokens=1)
    with pytest.raises(RequestRefused, match="request_id: r is in use"):
        d.s.add(Request("r", StoredTokens([1]), SamplingParams()))
    d.run()
    again = Request("r", StoredTokens([1]), SamplingParams())
    d.s.add(again)
    assert again.seq != first.seq, "an executor never sees a name twice"
