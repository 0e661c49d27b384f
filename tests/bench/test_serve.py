# SPDX-License-Identifier: Apache-2.0
"""`paceline bench serve` as a user runs it, against a scripted server: requests, result file, summary, exit status."""

from __future__ import annotations

import itertools
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.core.workload import Workload, arrival_times, generate
from tests.bench.scripted import Answer, Asked, ScriptedServer, Streamed, Whole, as_asked, scripted, text_chunk
from tests.bench.test_counters import metrics

REFERENCE = Path(__file__).parents[1] / "core" / "data" / "vllm_result_detailed.json"
SMALL = ["--random-input-len", "20", "--random-output-len", "5", "--random-range-ratio", "0.4", "--seed", "7"]
TEXT = [*SMALL, "--random-vocab-size", "128"]
"""The scripted server's tokens are bytes, of which these are characters; it adds one token in front of a prompt."""
ALL_METRICS = "ttft,tpot,itl,e2el,client_queue_time,e2el_including_client_queue"
OURS = {
    *(f"{s}_{name}_ms" for s in ("mean", "median", "std", "p50", "p90", "p99", "p99.9")
      for name in ("ttft_from_intended", "e2el_from_intended", "dispatch_delay")),
    "num_chunks", "tokens_per_chunk", "client_cpu_s", "dispatch_delays",
}  # fmt: skip
"""Keys that vLLM's result file does not have."""


def bench(server: ScriptedServer, *args: str) -> int:
    return main(["bench", "serve", "--base-url", server.base_url, *args])


def result(server: ScriptedServer, folder: Path, *args: str) -> dict[str, Any]:
    """The result file of a run, which must succeed."""
    saving = ["--save-result", "--result-dir", str(folder / "new"), "--result-filename", "r.json"]
    assert bench(server, *args, *saving) == 0
    return json.loads((folder / "new" / "r.json").read_text())


def test_result_file_has_the_reference_s_keys_in_its_order(tmp_path: Path) -> None:
    want = json.loads(REFERENCE.read_text())
    with scripted() as server:
        got = result(server, tmp_path, *TEXT, "--num-prompts", "12", "--max-concurrency", "4", "--request-rate", "500",
                     "--percentile-metrics", ALL_METRICS, "--metric-percentiles", "50,90,99,99.9", "--save-detailed",
                     "--goodput", "ttft:60000", "tpot:60000", "--metadata", "hw=cpu")  # fmt: skip
    assert [key for key in got if key in want] == list(want)
    assert set(got) - set(want) == OURS
    for key in want:
        assert isinstance(got[key], type(want[key])) or want[key] is None or key == "tokenizer_id", key
    per_request = [key for key in got if isinstance(got[key], list)]
    assert {len(got[key]) for key in per_request} == {12}
    assert (got["completed"], got["failed"], got["hw"]) == (12, 0, "cpu")
    assert got["request_goodput"] == got["request_throughput"]
    assert got["max_concurrent_requests"] <= 12


@pytest.mark.parametrize("form", ["text", "ids", "chat"])
def test_lengths_and_arrivals_are_the_core_s(tmp_path: Path, form: str) -> None:
    workload = Workload(input_len=20, output_len=5, range_ratio=0.4, num_prompts=15, request_rate=400, burstiness=0.5,
                        seed=7)  # fmt: skip
    options = {"text": [], "ids": ["--prompt-token-ids"], "chat": ["--backend", "openai-chat"]}[form]
    if form != "ids":
        workload = Workload(**{**_fields(workload), "input_len": 19})
    with scripted() as server:
        got = result(server, tmp_path, *TEXT, *options, "--num-prompts", "15", "--request-rate", "400",
                     "--burstiness", "0.5", "--save-detailed")  # fmt: skip
    jobs = generate(workload)
    assert got["output_lens"] == [job.output_len for job in jobs]
    seen = sorted(map(_asked_lengths, server.bodies))
    assert seen == sorted((job.prompt_len, job.output_len) for job in jobs)
    intended = [
        s - q - d for s, q, d in zip(got["start_times"], got["queue_times"], got["dispatch_delays"], strict=True)
    ]
    at = arrival_times(workload)
    assert [i - intended[0] for i in intended] == pytest.approx([a - at[0] for a in at])


def _fields(workload: Workload) -> dict[str, Any]:
    return {name: getattr(workload, name) for name in workload.__dataclass_fields__}


def _asked_lengths(body: dict[str, Any]) -> tuple[int, int]:
    """(prompt tokens, output tokens) of a request; text is a byte a token."""
    if "messages" in body:
        return len(body["messages"][0]["content"].encode()), body["max_completion_tokens"]
    prompt = body["prompt"]
    return len(prompt if isinstance(prompt, list) else prompt.encode()), body["max_tokens"]


def test_token_ids_are_sent_as_the_simulator_has_them() -> None:
    with scripted() as server:
        assert bench(server, *SMALL, "--prompt-token-ids", "--random-vocab-size", "900", "--random-prefix-len", "3",
                     "--num-prompts", "6", "--max-concurrency", "1") == 0  # fmt: skip
    workload = Workload(
        input_len=20, output_len=5, range_ratio=0.4, prefix_len=3, num_prompts=6, seed=7, vocab_size=900
    )
    want = [list(job.source(900).tokens(0, job.prompt_len)) for job in generate(workload)]
    assert [body["prompt"] for body in server.bodies] == want
    assert all(body["ignore_eos"] is True for body in server.bodies)


def test_what_a_request_contains() -> None:
    common = {"model": "m", "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0, "top_k": 3}
    options = [*TEXT, "--model", "m", "--temperature", "0", "--extra-body", '{"top_k": 3}', "--no-ignore-eos",
               "--num-prompts", "1"]  # fmt: skip
    with scripted() as server:
        assert bench(server, *options) == 0
        assert bench(server, *options, "--backend", "openai-chat") == 0
    completion, chat = server.bodies
    assert {**common, "prompt": completion["prompt"], "max_tokens": completion["max_tokens"]} == completion
    content = chat["messages"][0]["content"]
    assert {**common, "messages": [{"role": "user", "content": content}],
            "max_completion_tokens": chat["max_completion_tokens"]} == chat  # fmt: skip
    assert content == completion["prompt"]


def test_warm_ups_are_requests_of_their_own_and_do_not_count(tmp_path: Path) -> None:
    with scripted() as server:
        got = result(server, tmp_path, *TEXT, "--prompt-token-ids", "--num-prompts", "5", "--num-warmups", "3",
                     "--max-concurrency", "2")  # fmt: skip
    assert got["completed"] == 5
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(prompts) == 8
    assert {p[:2] for p in prompts[:3]}.isdisjoint(p[:2] for p in prompts[3:])
    assert server.most_in_flight <= 2


def test_summary_has_the_reference_s_labels(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted() as server:
        assert bench(server, *TEXT, "--num-prompts", "8", "--max-concurrency", "2", "--request-rate", "500",
                     "--percentile-metrics", ALL_METRICS, "--goodput", "e2el:60000") == 0  # fmt: skip
    out = capsys.readouterr().out
    shown = {line[:40].strip(): line[40:].strip() for line in out.splitlines()}
    assert shown["Successful requests:"] == "8"
    assert shown["Failed requests:"] == "0"
    assert shown["Maximum request concurrency:"] == "2"
    assert shown["Request rate configured (RPS):"] == "500.00"
    assert shown["Mean tokens per chunk:"] == "1.00"
    labels = ("Benchmark duration (s)", "Total input tokens", "Total generated tokens", "Request throughput (req/s)",
              "Request goodput (req/s)", "Output token throughput (tok/s)", "Peak output token throughput (tok/s)",
              "Peak concurrent requests", "Total token throughput (tok/s)")  # fmt: skip
    for label in labels:
        assert float(shown[f"{label}:"]) > 0, label
    for metric in ("TTFT", "TPOT", "ITL", "E2EL", "Client Queue Time", "E2EL incl. Client Queue", "TTFT from Intended",
                   "E2EL from Intended", "Dispatch Delay"):  # fmt: skip
        for statistic in ("Mean", "P99"):
            assert float(shown[f"{statistic} {metric} (ms):"]) >= 0, metric
    # What was intended lies before what was sent.
    assert float(shown["Mean E2EL from Intended (ms):"]) >= float(shown["Mean E2EL (ms):"])


def test_closed_loop_has_no_intended_times(tmp_path: Path) -> None:
    with scripted() as server:
        got = result(server, tmp_path, *TEXT, "--num-prompts", "4", "--max-concurrency", "1")
    assert got["request_rate"] == "inf"
    assert not [key for key in got if "intended" in key or "client_queue" in key]
    assert not [key for key in got if isinstance(got[key], list)]
    assert got["mean_dispatch_delay_ms"] >= 0


def test_failures_are_counted_and_their_reasons_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = itertools.count()

    def script(asked: Asked) -> Answer:
        turn = next(turns) % 4
        if turn == 1:
            return Streamed([text_chunk("x")])
        if turn == 2:
            return Whole(500, b'{"error": {"message": "out of luck"}}')
        return as_asked(asked)

    with scripted(ScriptedServer(script)) as server:
        got = result(server, tmp_path, *TEXT, "--num-prompts", "12", "--max-concurrency", "1", "--save-detailed")
    out = capsys.readouterr().out
    assert (got["completed"], got["failed"]) == (6, 6)
    assert got["errors"].count("") == 6
    assert "3 x the stream ended without [DONE]" in out
    assert "3 x HTTP 500: out of luck" in out
    # Only what succeeded counts.
    assert got["total_output_tokens"] == sum(got["output_lens"])
    assert got["output_lens"].count(0) == 6


def test_nothing_completed_is_exit_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    refusing = ScriptedServer(lambda _: Whole(404, b'{"error": {"message": "no such model"}}'))
    with scripted(refusing) as server, pytest.raises(SystemExit) as left:
        bench(server, *TEXT, "--num-prompts", "3")
    assert left.value.code == 1
    assert "3 x HTTP 404: no such model" in capsys.readouterr().out


def test_speculation_is_the_server_s_own_count_of_this_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = [metrics(100, 300, 90, [50, 30, 10]), metrics(120, 360, 117, [66, 38, 13])]
    with scripted(ScriptedServer(metrics=both)) as server:
        got = result(server, tmp_path, *TEXT, "--num-prompts", "2")
    assert got["spec_decode_num_drafts"] == 20
    assert got["spec_decode_draft_tokens"] == 60
    assert got["spec_decode_accepted_tokens"] == 27
    assert got["spec_decode_acceptance_length"] == 1 + 27 / 20
    assert got["spec_decode_acceptance_rate"] == pytest.approx(45.0)
    assert got["spec_decode_per_position_acceptance_rates"] == pytest.approx([0.8, 0.4, 0.15])
    assert "Acceptance length:                       2.35" in capsys.readouterr().out


def test_a_server_without_token_counts_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def script(asked: Asked) -> Answer:
        answer = as_asked(asked)
        assert isinstance(answer, Streamed)
        return Streamed([piece for piece in answer.pieces if b'"usage"' not in piece])

    with scripted(ScriptedServer(script)) as server:
        by_text = result(server, tmp_path, *TEXT, "--num-prompts", "3", "--save-detailed")
        assert "counted by the tokenizer" in capsys.readouterr().out
        by_chunk = result(server, tmp_path, *TEXT, "--num-prompts", "3", "--save-detailed", "--prompt-token-ids")
        assert "counted as one per chunk" in capsys.readouterr().out
    assert by_text["output_lens"] == by_chunk["output_lens"] == [len(t) for t in by_text["generated_texts"]]


def test_custom_prompts_as_chat_need_no_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"prompt": "hello"}\n{"prompt": "good bye"}\n')
    with scripted(ScriptedServer(tokenizes=False)) as server:
        got = result(server, tmp_path, "--dataset-name", "custom", "--dataset-path", str(path), "--num-prompts", "2",
                     "--custom-output-len", "3", "--backend", "openai-chat", "--save-detailed")  # fmt: skip
    assert {body["messages"][0]["content"] for body in server.bodies} == {"hello", "good bye"}
    assert not any("ignore_eos" in body for body in server.bodies)
    assert sorted(got["input_lens"]) == [5, 8]
    assert got["output_lens"] == [3, 3]


def test_default_file_name(tmp_path: Path) -> None:
    with scripted() as server:
        options = ["--num-prompts", "2", "--max-concurrency", "2", "--model", "org/tiny"]
        assert bench(server, *TEXT, *options, "--save-result", "--result-dir", str(tmp_path)) == 0
    [path] = tmp_path.iterdir()
    date = json.loads(path.read_text())["date"]
    assert path.name == f"openai-infqps-concurrency2-tiny-{date}.json"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--dataset-path", "x"], "dataset_path"),
        (["--dataset-name", "custom"], "dataset_path"),
        (["--dataset-name", "custom", "--random-input-len", "5"], "--random-input-len: is for --dataset-name random"),
        (["--custom-output-len", "5"], "--custom-output-len"),
        (["--prompt-token-ids", "--backend", "openai-chat"], "prompt_token_ids"),
        (["--skip-chat-template"], "skip_chat_template"),
        (["--random-range-ratio", "wide"], "--random-range-ratio"),
        (["--random-range-ratio", "1.5"], "range_ratio"),
        (["--random-range-ratio", '{"input": 0.1}'], "--random-range-ratio"),
        (["--percentile-metrics", "ttft,speed"], "speed"),
        (["--metric-percentiles", "99,101"], "metric_percentiles"),
        (["--metric-percentiles", "p99"], "--metric-percentiles"),
        (["--goodput", "ttft"], "--goodput"),
        (["--goodput", "itl:5"], "goodput"),
        (["--extra-body", "[1]"], "--extra-body"),
        (["--burstiness", "0.5"], "burstiness"),
        (["--max-concurrency", "0"], "max_concurrency"),
        (["--request-rate", "0"], "request_rate"),
        (["--save-detailed"], "--save-result"),
        (["--result-dir", "x"], "--save-result"),
        (["--metadata", "nothing"], "--save-result"),
        (["--base-url", "localhost:8000"], "base_url"),
        (["--endpoint", "completions"], "endpoint"),
        (["--backend", "tgi"], "backend"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused_by_name(
    args: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert captured.err.count("\n") == 1


def test_without_a_server_the_error_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert main(["bench", "serve", "--port", str(unused.getsockname()[1])]) == 2
    err = capsys.readouterr().err
    assert "paceline serve smollm2" in err
    assert "--ready-check-timeout-sec" in err
