# SPDX-License-Identifier: Apache-2.0
"""Two ranks that share experts, as processes, with a drafter that shares experts too: every collective is real."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.eagle3.heads import save_target
from tests.line.conftest import MAX_MODEL_LEN, Alone, Models, command
from tests.ports import free_port
from tests.server.harness import DEADLINE_S, Server, running, wait_until

COMPLETIONS = "/v1/completions"
VOCAB = 256


def complete(server: Server, prompt: Sequence[int], max_tokens: int, rank: int | None = None) -> tuple[int, ...]:
    """The greedy tokens that follow ``prompt``."""
    fields = {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    reply = server.post(COMPLETIONS, fields, headers)
    assert reply.status == 200, reply.text
    return tuple(reply.json["choices"][0]["token_ids"])


def steps(server: Server, rank: int, kind: str = "steps") -> list[float]:
    """Steps of a rank, eager and FULL."""
    return [server.metric(f"paceline:{kind}_total", engine=str(rank), mode=mode) for mode in ("NONE", "FULL")]


def prompt_of(rng: random.Random, longest: int = 60) -> list[int]:
    return [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, longest))]


@pytest.mark.parametrize("rank", [0, 1])
def test_L1_L2_one_busy_rank_and_an_idle_one(experts: Server, alone: Alone, rank: int) -> None:
    prompt = list(range(3, 12))
    before = [steps(experts, 1 - rank, "dummy_steps"), steps(experts, rank)]
    assert complete(experts, prompt, 40, rank) == alone(prompt, 40)

    def gained() -> list[list[float]]:
        after = [steps(experts, 1 - rank, "dummy_steps"), steps(experts, rank)]
        return [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(after, before, strict=True)]

    wait_until(lambda: gained()[0] == gained()[1] and sum(gained()[1]), "a dummy for each step")
    eager, full = gained()[1]
    assert eager == 1, "the prefill"
    assert full > 0


def test_L3_a_rank_near_its_limit_drafts_no_more_and_nobody_waits(experts: Server, alone: Alone) -> None:
    near, other = list(range(1, MAX_MODEL_LEN - 8)), [9, 8, 7]
    said: dict[int, tuple[int, ...]] = {}
    threads = [
        threading.Thread(target=lambda r=rank, p=prompt, n=n: said.update({r: complete(experts, p, n, r)}))
        for rank, prompt, n in ((0, near, 9), (1, other, 60))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert said == {0: alone(near, 9), 1: alone(other, 60)}


@pytest.mark.long
def test_soak(experts: Server, alone: Alone) -> None:
    """200 requests of uneven lengths, aborts, gaps in which the group falls asleep: no hang, no leak, equal tokens."""
    rng = random.Random(7)
    jobs = [
        Job(prompt_of(rng), rng.choice((1, 2, 5, 20, 50)), rng.choice((0, 1, None)), rng.random()) for _ in range(200)
    ]
    said: dict[int, tuple[int, ...]] = {}
    # Few at a time, so that ranks fall idle and the group falls asleep; then many, so that queues form.
    for width, first, last in ((3, 0, 60), (1, 60, 90), (12, 90, 200)):
        run_all(experts, {i: jobs[i] for i in range(first, last)}, width, said)
    for rank in ("0", "1"):
        experts.wait_metric("vllm:num_requests_running", 0, engine=rank)
        experts.wait_metric("vllm:num_requests_waiting", 0, engine=rank)
        experts.wait_metric("vllm:kv_cache_usage_perc", 0, engine=rank)
    assert sorted(said) == [i for i, job in enumerate(jobs) if not job.abandoned]
    for i, tokens in said.items():
        assert tokens == alone(jobs[i].prompt, jobs[i].max_tokens), f"request {i}"


@dataclass(frozen=True)
class Job:
    """A request of the soak; ``fate`` in [0, 1) says whether its client leaves, or rests after it."""

    prompt: list[int]
    max_tokens: int
    rank: int | None
    fate: float

    @property
    def abandoned(self) -> bool:
        return self.fate < 0.2


def run_all(server: Server, jobs: dict[int, Job], width: int, said: dict[int, tuple[int, ...]]) -> None:
    """Send ``jobs``, ``width`` at a time."""
    pending, failures = list(jobs.items()), []

    def work() -> None:
        # list.pop is atomic.
        with contextlib.suppress(IndexError):
            while True:
                i, job = pending.pop()
                try:
                    if job.abandoned:
                        abandon(server, job.prompt, job.rank, job.fate / 4)
                    else:
                        said[i] = complete(server, job.prompt, job.max_tokens, job.rank)
                except Exception as error:
                    failures.append(error)
                if job.fate > 0.9:
                    time.sleep(job.fate - 0.9)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(width)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads), "it hangs"
    assert not failures, failures


def abandon(server: Server, prompt: Sequence[int], rank: int | None, after_s: float) -> None:
    """Send a request and leave."""
    connection = server.connection()
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    body = {"prompt": list(prompt), "max_tokens": 60, "stream": True, "ignore_eos": True}
    connection.request("POST", COMPLETIONS, json.dumps(body).encode(), headers)
    time.sleep(after_s)
    connection.close()


@pytest.mark.parametrize(
    ("number", "asleep"), [(signal.SIGKILL, False), (signal.SIGSTOP, False), (signal.SIGSTOP, True)]
)
def test_L10_ranks_that_meet_in_memory_notice_too(models: Models, number: signal.Signals, asleep: bool) -> None:
    with running(command(models)) as server:
        ranks = server.children()
        failed: list[int] = []

        def ask(rank: int) -> None:
            while not failed:
                with contextlib.suppress(OSError):
                    status = server.post(
                        COMPLETIONS,
                        {"prompt": [5], "max_tokens": 100, "ignore_eos": True},
                        {"X-data-parallel-rank": str(rank)},
                    ).status
                    if status != 200:
                        failed.append(status)

        threads = [] if asleep else [threading.Thread(target=ask, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        if threads:
            wait_until(lambda: sum(steps(server, 1)) > 20, "both to be busy")
        began = time.monotonic()
        os.kill(ranks[1], number)
        assert server.wait() == 1
        assert time.monotonic() - began < 5.0
        for thread in threads:
            thread.join(DEADLINE_S)
        assert asleep or failed[0] in (500, 503)
        assert "rank 1" in "".join(server.log)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data-parallel-size", "2", "--headless"], "--data-parallel-size-local"),
        (["--compilation-config", '{"level": 3}'], "compilation_config.level"),
        (["--compilation-config", '{"cudagraph_mode": "PIECEWISE"}'], "compilation_config.cudagraph_mode"),
        (["--compilation-config", '{"cudagraph_capture_sizes": [0]}'], "compilation_config.cudagraph_capture_sizes"),
        (["--compilation-config", '{"cudagraph_capture_sizes": 4}'], "compilation_config.cudagraph_capture_sizes"),
    ],
)
def test_flags_that_cannot_be_honoured_are_named(models: Models, flags: list[str], words: str) -> None:
    server = Server(["-m", "paceline", "serve", str(models.target), "--port", "0", *flags])
    assert server.wait() != 0
    said = "".join(server.log)
    assert words in said
    assert "Traceback" not in said


def test_experts_of_a_dense_model_are_refused(tmp_path: Path) -> None:
    flags = ["--data-parallel-size", "2", "--enable-expert-parallel", "--max-model-len", "64"]
    server = Server(["-m", "paceline", "serve", str(save_target(tmp_path)), "--port", "0", *flags])
    assert server.wait() != 0
    assert "enable_expert_parallel" in "".join(server.log)


@pytest.mark.parametrize("ending", ["stop", pytest.param("freeze", marks=pytest.mark.long)])
def test_ranks_with_servers_of_their_own_keep_step_too(models: Models, alone: Alone, ending: str) -> None:
    """Each server has one rank; they meet at an address, wake each other, and end together."""
    meeting = ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(free_port())]
    servers = [Server(command(models, *meeting, "--data-parallel-rank", str(rank))) for rank in range(2)]
    try:
        for server in servers:
            server.wait_ready()
        for rank in (0, 1, 1, 0):
            prompt = [rank + 3, 7, 9]
            assert complete(servers[rank], prompt, 20, 0) == alone(prompt, 20)
            time.sleep(0.1)
        name = "paceline:dummy_steps_total"
        wait_until(lambda: servers[0].metric(name, engine="0", mode="FULL") > 0, "dummies of rank 0")
        wait_until(lambda: servers[1].metric(name, engine="1", mode="FULL") > 0, "dummies of rank 1")
        if ending == "stop":
            again = Server(command(models, *meeting, "--data-parallel-rank", "1"))
            assert again.wait() != 0
            assert "rank 1 came twice" in "".join(again.log)
            for server in servers:
                server.terminate()
            assert [server.wait() for server in servers] == [0, 0]
        else:
            os.kill(servers[1].engine_pid(), signal.SIGSTOP)
            assert servers[1].wait() == 1
            assert "frozen" in "".join(servers[1].log)
            assert servers[0].wait() == 1, "rank 0 sleeps, and notices"
            assert "another rank" in "".join(servers[0].log)
    finally:
        for server in servers:
            if server.process.poll() is None:
                server.process.kill()
                server.process.communicate()


@pytest.mark.parametrize("ending", ["stop", "rank", "server"])
def test_headless_ranks_are_served_by_the_server_of_rank_0(models: Models, alone: Alone, ending: str) -> None:
    """A second machine's rank, over TCP; whichever of the two ends, both do."""
    meeting = ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(free_port())]
    own = [*meeting, "--data-parallel-size-local", "1"]
    server = Server(command(models, *own))
    remote = Server(command(models, *own, "--headless", "--data-parallel-start-rank", "1"))
    try:
        server.wait_ready()
        for rank in (1, 0, 1):
            assert complete(server, [rank + 3, 7, 9], 20, rank) == alone([rank + 3, 7, 9], 20)
        assert server.metric("vllm:request_success_total", engine="1", finished_reason="length") == 2
        if ending == "stop":
            server.terminate()
            assert server.wait() == 0
            assert remote.wait() == 0, remote.log
        elif ending == "rank":
            os.kill(remote.engine_pid(), signal.SIGKILL)
            assert server.wait() == 1
            assert "another rank" in "".join(server.log)
            assert remote.wait() == 1
        else:
            server.process.kill()
            server.process.communicate()
            assert remote.wait() in (0, 1)
            server.check_folder()
    finally:
        for process in (server.process, remote.process):
            if process.poll() is None:
                process.kill()
                process.communicate()
