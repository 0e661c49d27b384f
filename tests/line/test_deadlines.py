# SPDX-License-Identifier: Apache-2.0
"""Ranks that come late, or never, while their processes live."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from paceline.core.request import SamplingParams
from paceline.engine.messages import Add, Dead, Stop, Update, decode_from_engine, encode
from paceline.runtime.engine_group import EngineFailed, EngineGroup, EngineRefused
from tests.line.conftest import Alone, Models
from tests.line.late import FACTORY
from tests.line.test_nodes import end
from tests.line.test_servers import COMPLETIONS, open_stream
from tests.ports import free_port
from tests.server.harness import DEADLINE_S, Server, events, fake_server, wait_until

DEADLINE = 2.0
"""How long ranks wait for each other, in seconds."""


@contextmanager
def group(models: Models, ranks: int, **options: Any) -> Iterator[EngineGroup]:
    """Engines that share experts, without a server; gone afterwards."""
    place = {"enable_expert_parallel": True, "timeout_s": DEADLINE, **options.pop("data_parallel", {})}
    chosen = {
        "model": str(models.target),
        "dtype": "float32",
        "seed": 0,
        "max_model_len": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "long_prefill_token_threshold": 0,
        "scheduling_policy": "fcfs",
        "block_size": 8,
        "kv_cache_memory_bytes": None,
        "num_gpu_blocks_override": 40,
        "enable_prefix_caching": True,
        "speculative_config": None,
        "data_parallel": place,
        **options,
    }
    engines = EngineGroup(FACTORY, chosen, ranks)
    try:
        yield engines
    finally:
        engines.kill()


def hear(engines: EngineGroup, kind: type[Any]) -> Any:
    """The next message of a kind."""
    ends = time.monotonic() + DEADLINE_S
    while time.monotonic() < ends:
        if engines.outbox.poll(100) and isinstance(message := decode_from_engine(engines.outbox.recv()), kind):
            return message
    raise AssertionError(f"no {kind.__name__} came")


def add(engines: EngineGroup, rank: int, prompt: list[int], max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    engines.inboxes[rank].send(encode([Add(f"r{rank}", prompt, params, time.monotonic())]))


@pytest.mark.long
@pytest.mark.parametrize("where", ["in memory", "over the network"])
def test_ranks_may_load_and_warm_up_for_longer_than_a_step_may_take(models: Models, alone: Alone, where: str) -> None:
    place = {} if where == "in memory" else {"store": f"127.0.0.1:{free_port()}"}
    with group(models, 2, late_s=1.5 * DEADLINE, data_parallel=place) as engines:
        engines.wait_ready()
        add(engines, 1, [5, 6], 5)
        tokens: list[int] = []
        while len(tokens) < 5:
            for output in hear(engines, Update).outputs:
                tokens += output.token_ids
        assert tuple(tokens) == alone([5, 6], 5)
        for inbox in engines.inboxes:
            inbox.send(encode([Stop()]))
        engines.stop()


def test_a_rank_that_hangs_while_it_lives_is_named_by_those_that_share_memory_with_it(
    models: Models, capfd: pytest.CaptureFixture[str]
) -> None:
    with group(models, 3, hangs=True) as engines:
        engines.wait_ready()
        add(engines, 2, [5, 6], 20)
        dead = hear(engines, Dead)
        assert dead.peer_lost
        assert f"rank 2 did not come to a common step within {DEADLINE} s" in dead.reason
    assert "for rank 2 at a common step, and gives up after 2 s" in capfd.readouterr().err


def test_a_rank_that_hangs_amid_a_step_is_named_by_those_that_reach_it_over_the_network(models: Models) -> None:
    """Its experts are missed in the forward, not at the vote."""
    with group(models, 3, hangs=True, data_parallel={"store": f"127.0.0.1:{free_port()}"}) as engines:
        engines.wait_ready()
        add(engines, 2, [5, 6], 20)
        dead = hear(engines, Dead)
        assert dead.peer_lost
        assert "an exchange of tokens did not complete" in dead.reason
        assert "; rank 2 did not come" in dead.reason


def test_a_rank_that_hangs_is_named_to_clients_by_those_that_reach_it_over_the_network() -> None:
    options = {"step_s": 0.02, "hangs_at": ord("!"), "data_parallel": {"lockstep": True, "timeout_s": DEADLINE}}
    with fake_server(options, data_parallel_size=3) as server:
        bystander = open_stream(server, 0)
        reply = server.post(COMPLETIONS, {"prompt": "a!", "max_tokens": 5}, {"X-data-parallel-rank": "1"})
        assert reply.status == 500
        assert "; rank 1 did not come" in reply.error["message"]
        assert "; rank 1 did not come" in events(bystander.read())[-1]["error"]["message"]
        assert server.wait() == 1


@pytest.mark.long
def test_a_rank_that_nobody_runs_is_named(models: Models) -> None:
    """Of servers with ranks of their own, none hears of the others but at the meeting place."""
    place = {"store": f"127.0.0.1:{free_port()}", "size": 4, "join_timeout_s": 6.0}
    with (
        group(models, 2, data_parallel={**place, "first": 0}) as first,
        group(models, 1, data_parallel={**place, "first": 3}) as last,
    ):
        for engines in (first, last):
            with pytest.raises(EngineFailed, match=r"rank 2 of 4 did not come within 6 s.*data_parallel_start_rank"):
                engines.wait_ready()


def test_a_step_larger_than_the_memory_that_ranks_share_is_refused_at_the_start(models: Models) -> None:
    with (
        group(models, 2, max_num_batched_tokens=10_000_000) as engines,
        pytest.raises(EngineRefused, match="max_num_batched_tokens: ranks exchange at most"),
    ):
        engines.wait_ready()


def test_two_servers_that_claim_rank_0_are_told_so() -> None:
    place = {"lockstep": True, "timeout_s": 30.0, "size": 4, "first": 0, "store": f"127.0.0.1:{free_port()}"}
    given = json.dumps({"engine": {"data_parallel": place}, "data_parallel_size": 2})
    first, second = (Server(["-m", "tests.server.program", given]) for _ in range(2))
    try:
        wait_until(lambda: None in (first.process.poll(), second.process.poll()), "both to run")
        wait_until(lambda: first.process.poll() or second.process.poll(), "one to end")
        loser = first if first.process.poll() else second
        assert loser.wait() != 0
        said = "".join(loser.log)
        assert "does another node run rank 0 as well (data_parallel_start_rank)?" in said or "came twice" in said
    finally:
        end([first, second])


@pytest.mark.long
def test_requests_of_another_server_finish_when_one_is_told_to_stop() -> None:
    """Their ranks keep step: those of the server that ends go on with dummies for as long as the other has requests."""
    place = {"lockstep": True, "timeout_s": 30.0, "size": 2, "store": f"127.0.0.1:{free_port()}"}
    given = [
        json.dumps({"engine": {"step_s": 0.02, "data_parallel": {**place, "first": rank}}, "data_parallel_size": 1})
        for rank in range(2)
    ]
    servers = [Server(["-m", "tests.server.program", each]) for each in given]
    try:
        for server in servers:
            server.wait_ready()
        stream = open_stream(servers[1], max_tokens=400)
        servers[0].terminate()
        assert events(stream.read())[-1]["choices"][0]["finish_reason"] == "length"
        assert servers[0].wait() == 0
        assert servers[1].wait() == 1
        assert "rank 1: the group was stopped through another of its servers" in "".join(servers[1].log)
    finally:
        end(servers)
