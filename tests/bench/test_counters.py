# SPDX-License-Identifier: Apache-2.0
"""Speculation from Prometheus text, before and after."""

from __future__ import annotations

from paceline.bench.counters import read_counters, speculation_between


def metrics(drafts: float, tokens: float, accepted: float, per_position: list[float], engine: int = 0) -> str:
    labels = f'engine="{engine}",model_name="a, position=\\"9\\""'
    lines = [
        "# HELP vllm:spec_decode_num_drafts_total Drafts.",
        f"vllm:spec_decode_num_drafts_total{{{labels}}} {drafts}",
        f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {tokens:e}",
        f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {accepted}",
        f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.7e9",
        *(
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{engine}",position="{i}"}} {n}'
            for i, n in enumerate(per_position)
        ),
        "vllm:generation_tokens_total 12345.0",
    ]
    return "\n".join(lines) + "\n"


def test_the_run_s_own_share_summed_over_engines() -> None:
    before = read_counters(metrics(10, 30, 12, [6, 4, 2]) + metrics(5, 15, 0, [0, 0, 0], engine=1))
    after = read_counters(metrics(20, 60, 30, [14, 10, 6]) + metrics(15, 45, 9, [5, 3, 1], engine=1))
    found = speculation_between(before, after)
    assert found is not None
    assert (found.num_drafts, found.draft_tokens, found.accepted_tokens) == (20, 60, 27)
    assert found.accepted_per_position == (13, 9, 5)
    assert found.acceptance_length == 1 + 27 / 20
    assert found.to_json()["spec_decode_acceptance_rate"] == 45.0


def test_nothing_is_said_without_speculation() -> None:
    some = read_counters(metrics(10, 30, 12, [6, 4, 2]))
    assert read_counters("vllm:generation_tokens_total 5\n") is None
    assert read_counters("") is None
    assert speculation_between(None, some) is None
    assert speculation_between(some, None) is None
    assert speculation_between(some, some) is None


def test_a_server_that_was_restarted_in_between_says_nothing() -> None:
    assert speculation_between(read_counters(metrics(10, 30, 12, [6])), read_counters(metrics(2, 6, 1, [1]))) is None
