# SPDX-License-Identifier: Apache-2.0
"""Streams as they come off the wire, cut anywhere, and what a record says about them."""

from __future__ import annotations

import json

import pytest

from paceline.bench.streams import MAX_ERROR_CHARACTERS, AnswerReader
from paceline.core.results import RequestRecord, summarise
from tests.bench.scripted import DONE, chat_chunk, event, text_chunk, usage_event

WORDS = ["Zoë ", "isst ", "ein ", "日本の ", "🥐\u2028", "\r\n"]
ANSWER = [*map(text_chunk, WORDS), usage_event(7, 12), DONE]


def read(*reads: bytes, gap_s: float = 1.0) -> RequestRecord:
    """The record of a stream that arrived in these reads, ``gap_s`` apart, the first at 1 after a send at 0."""
    record = RequestRecord(prompt_len=0, intended_s=0.0, sent_s=0.0)
    reader = AnswerReader(record)
    for i, data in enumerate(reads):
        reader.feed(data, 1.0 + i * gap_s)
    reader.end()
    return record


def test_every_way_to_cut_a_stream_in_two_reads_the_same() -> None:
    whole = b"".join(ANSWER)
    for cut in range(len(whole) + 1):
        record = read(whole[:cut], whole[cut:])
        assert record.error is None, cut
        assert record.text == "".join(WORDS)
        assert len(record.chunk_s) == len(WORDS)
        assert record.chunk_s == sorted(record.chunk_s)
        assert (record.prompt_len, record.output_tokens) == (7, 12)


def test_byte_by_byte_with_crlf_comments_and_other_fields() -> None:
    stream = b": ping\n\n".join(ANSWER).replace(b"data: ", b"id: 3\ndata:").replace(b"\n", b"\r\n")
    record = read(*(stream[i : i + 1] for i in range(len(stream))), gap_s=0.001)
    assert record.error is None
    assert record.text == "".join(WORDS)


def test_data_over_several_lines_is_one_message() -> None:
    lines = json.dumps({"choices": [{"text": "hi"}]}, indent=1).encode().split(b"\n")
    record = read(b"".join(b"data: " + line + b"\n" for line in lines) + b"\n", DONE)
    assert (record.error, record.text) == (None, "hi")


def test_a_chunk_s_time_is_when_its_bytes_came_in_order() -> None:
    record = read(text_chunk("a"), text_chunk("b") + text_chunk("c"), b"".join([text_chunk("d"), DONE]), gap_s=0.5)
    assert record.chunk_s == [1.0, 1.5, 1.5, 2.0]
    assert record.ttft_s == 1.0
    assert record.itls_s().tolist() == [0.5, 0.0, 0.5]
    assert record.latency_s == 2.0


def test_the_usage_chunk_counts_tokens_and_is_no_chunk() -> None:
    record = read(text_chunk("abc"), text_chunk("def"), usage_event(5, 6) + DONE, gap_s=0.03)
    assert record.chunk_s == [1.0, 1.03]
    assert (record.prompt_len, record.output_tokens) == (5, 6)


def test_chunks_of_several_tokens_itl_per_chunk_tpot_per_token_peak_in_tokens() -> None:
    pieces = [text_chunk("abc", token_ids=[1, 2, 3]), text_chunk("def", token_ids=[4, 5, 6])]
    for stream in ([*pieces, DONE], [text_chunk("abc"), text_chunk("def"), usage_event(2, 6), DONE]):
        record = read(*stream, gap_s=0.03)
        summary = summarise([record], 2.0)
        assert record.output_tokens == 6
        assert summary.itl.mean_ms == pytest.approx(30.0)
        assert summary.tpot.mean_ms == pytest.approx(6.0)
        assert summary.tokens_per_chunk == 3.0
        assert summary.max_output_tokens_per_s == 6.0


def test_tokens_of_each_chunk_from_usage_that_runs_along() -> None:
    def piece(text: str, so_far: int) -> bytes:
        counts = {"prompt_tokens": 4, "completion_tokens": so_far}
        return event({"choices": [{"text": text}], "usage": counts})

    record = read(piece("a", 1), piece("bcd", 4), piece("ef", 6), usage_event(4, 6) + DONE)
    assert record.chunk_tokens == [1, 3, 2]
    assert (record.prompt_len, record.output_tokens) == (4, 6)


def test_counts_only_in_the_last_chunk_do_not_belong_to_it_alone() -> None:
    last = event({"choices": [{"text": "b", "finish_reason": "stop"}], "usage": {"completion_tokens": 9}})
    record = read(text_chunk("a"), last, DONE)
    assert record.output_tokens == 9
    assert record.chunk_tokens is None


def test_without_any_count_the_tokens_are_unknown() -> None:
    assert read(text_chunk("a"), text_chunk("b"), DONE).output_tokens == 0


def test_chat_the_opening_chunk_is_the_first_message_but_has_no_token() -> None:
    opening = chat_chunk({"role": "assistant", "content": ""})
    words = [chat_chunk({"content": "Hello"}), chat_chunk({"content": " you"}, finish_reason="stop")]
    record = read(opening, *words, usage_event(9, 4), DONE)
    assert record.error is None
    assert record.text == "Hello you"
    assert record.ttft_s == 1.0
    assert len(record.chunk_s) == 3
    assert summarise([record], 9.0).tokens_per_chunk == 2.0


def test_chat_with_token_ids_counts_them_per_chunk() -> None:
    opening = chat_chunk({"role": "assistant", "content": None})
    record = read(opening, chat_chunk({"content": "ab"}, token_ids=[1, 2]), chat_chunk({}, finish_reason="stop",
                  token_ids=[3]), DONE)  # fmt: skip
    assert record.chunk_tokens == [0, 2, 1]
    assert record.output_tokens == 3


def test_a_role_beside_text_is_no_mere_opening() -> None:
    record = read(chat_chunk({"role": "assistant", "content": "x"}), usage_event(1, 1), DONE)
    assert record.silent_chunks == 0


@pytest.mark.parametrize(
    ("ending", "says"),
    [
        (event({"error": {"message": "out of blocks", "type": "E", "code": 500}}) + DONE, "out of blocks"),
        (event({"error": "no"}) + DONE, "no"),
        (event({"object": "error", "message": "old style", "code": 400}), "old style"),
        (b'event: error\ndata: {"detail": "named"}\n\n' + DONE, "named"),
        (b"event: error\ndata: plain words\n\n", "plain words"),
        (text_chunk("", finish_reason="abort") + DONE, "finish_reason: abort"),
        (text_chunk("", finish_reason="error") + DONE, "finish_reason: error"),
        (b"data: {broken\n\n" + DONE, "{broken"),
        (b'data: {"choices": 5}\n\n' + DONE, "choices"),
        (b"", "[DONE]"),
        (usage_event(1, 1), "[DONE]"),
        (b"event: error\ndata: cut off", "[DONE]"),
        (b"data: [DON", "[DONE]"),
    ],
)
def test_what_does_not_end_well_is_a_failure_that_says_why(ending: bytes, says: str) -> None:
    record = read(text_chunk("all ") + text_chunk("was well"), ending)
    assert record.error is not None
    assert says in record.error
    assert not record.ok
    assert summarise([record], 1.0).failed == 1
    assert record.text == "all was well"


def test_done_without_its_empty_line_is_done() -> None:
    assert read(text_chunk("a"), DONE.strip()).error is None


def test_done_alone_is_no_answer() -> None:
    assert "without a single chunk" in (read(DONE).error or "")
    assert "[DONE]" in (read().error or "")


def test_errors_are_shown_on_one_line_of_bounded_length() -> None:
    record = read(event({"error": {"message": "one\ntwo " + "x" * 5000}}))
    assert record.error is not None
    assert record.error.startswith("one two xx")
    assert len(record.error) <= MAX_ERROR_CHARACTERS
