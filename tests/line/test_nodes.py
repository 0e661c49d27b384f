# SPDX-License-Identifier: Apache-2.0
"""Nodes without a server, as processes: which ranks they are given, and whose fault it is when that cannot be."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from paceline.engine.messages import Arrival, Dead, ModelInfo, Ready, decode_placed, encode
from tests.line.conftest import Alone, Models, command
from tests.ports import free_port
from tests.server.harness import DEADLINE_S, Server, alive, wait_until

COMPLETIONS = "/v1/completions"
IN_STEP = {"lockstep": True, "timeout_s": 60.0}


class Place:
    """A meeting place and whoever comes there. ``size``: ranks of the group."""

    def __init__(self, size: int, **options: Any) -> None:
        port = free_port()
        self.front = f"127.0.0.1:{port + 1}"
        self._options = {"size": size, "front": self.front, "store": f"127.0.0.1:{port}", **options}
        self.processes: list[Server] = []

    def server(self, ranks: int) -> Server:
        """Start the server, with the first ``ranks`` ranks."""
        given = {"engine": {"data_parallel": {**self._options, "first": 0}}, "data_parallel_size": ranks}
        return self._started(["-m", "tests.server.program", json.dumps(given)])

    def node(self, ranks: int, first: int | None = None, **options: Any) -> Server:
        """Start a node with ``ranks`` ranks."""
        given = {"data_parallel": {**self._options, "first": first, **options}}
        return self._started(["-m", "tests.line.node", json.dumps(given), str(ranks)])

    def _started(self, command: list[str]) -> Server:
        process = Server(command)
        self.processes.append(process)
        return process


Meet = Callable[..., Place]


@pytest.fixture
def meet() -> Iterator[Meet]:
    """Makes meeting places; nobody who came there is left afterwards."""
    places: list[Place] = []

    def make(size: int, **options: Any) -> Place:
        places.append(Place(size, **options))
        return places[-1]

    yield make
    for place in places:
        end(place.processes)


def end(processes: list[Server]) -> None:
    """Kill those that still run; their engines must end, and their files go."""
    engines = [pid for each in processes if each.process.poll() is None for pid in each.children()]
    for each in processes:
        if each.process.poll() is None:
            each.process.kill()
            each.process.communicate()
    wait_until(lambda: not any(map(alive, engines)), "the engines to end")
    for each in processes:
        if each.folder.exists():
            each.check_folder()


def placed(node: Server) -> list[int]:
    """First and last rank of a node, once it says so."""
    assert node.process.stdout is not None
    for line in node.process.stdout:
        node.log.append(line)
        if found := re.search(r"running ranks (\d+) to (\d+)", line):
            return [int(number) for number in found.groups()]
    raise AssertionError(f"the node ended: {''.join(node.log)}")


def refused(node: Server) -> str:
    """What a node says that ends since it is not wanted."""
    assert node.wait() == 1
    return "".join(node.log)


def check_all_serve(server: Server, ranks: int) -> None:
    for rank in range(ranks):
        reply = server.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 5}, {"X-data-parallel-rank": str(rank)})
        assert (reply.status, reply.json["choices"][0]["text"]) == (200, "abcab")
        assert server.metric("vllm:request_success_total", engine=str(rank), finished_reason="length") == 1


@pytest.mark.parametrize("options", [{}, IN_STEP], ids=["replicas", "in step"])
def test_nodes_get_their_ranks_in_the_order_in_which_they_come(meet: Meet, options: dict[str, Any]) -> None:
    place = meet(6, **options)
    server = place.server(1)
    assert placed(place.node(1, first=5)) == [5, 5]
    assert placed(place.node(2)) == [1, 2]
    assert placed(place.node(2)) == [3, 4]
    server.wait_ready()
    check_all_serve(server, 6)
    server.terminate()
    assert [each.wait() for each in place.processes] == [0] * 4


def test_nodes_may_come_before_the_server(meet: Meet) -> None:
    place = meet(3)
    nodes = [place.node(1), place.node(1)]
    server = place.server(1)
    assert sorted(placed(node)[0] for node in nodes) == [1, 2]
    server.wait_ready()
    check_all_serve(server, 3)


@pytest.mark.parametrize(
    ("ranks", "options", "words"),
    [
        (1, {"first": 1}, "data_parallel_start_rank: asked for rank 1, but the server runs ranks 0 to 1"),
        (2, {"first": 3}, "data_parallel_start_rank: asked for ranks 3 to 4, but another node runs rank 3"),
        (2, {"first": 4}, "data_parallel_start_rank: ranks 4 to 5 of 5 do not exist"),
        (2, {}, "data_parallel_size_local: 2 in a row are not free, of 5 ranks only 2, 4 are"),
        (1, {"size": 4}, "data_parallel_size: 5 at the server, 4 here"),
        (1, {"lockstep": True}, "enable_expert_parallel: given to this node, but not to the server"),
    ],
)
def test_a_node_that_does_not_fit_is_told_and_disturbs_nobody(
    meet: Meet, ranks: int, options: dict[str, Any], words: str
) -> None:
    place = meet(5)
    server = place.server(2)
    assert placed(place.node(1, first=3)) == [3, 3]
    assert words in refused(place.node(ranks, **options))
    assert [placed(place.node(1)) for _ in range(2)] == [[2, 2], [4, 4]]
    server.wait_ready()
    check_all_serve(server, 5)


def test_a_node_of_another_version_is_refused(meet: Meet) -> None:
    place = meet(2)
    server = place.server(1)
    with zmq.Context() as context, context.socket(zmq.PUSH) as front, context.socket(zmq.PULL) as inbox:
        port = inbox.bind_to_random_port("tcp://127.0.0.1")
        front.connect(f"tcp://{place.front}")
        front.send(encode(Arrival(1, 2, None, False, f"tcp://127.0.0.1:{port}", "0.0.1")))
        assert inbox.poll(1000 * DEADLINE_S)
        assert "this node 0.0.1; they must be equal" in decode_placed(inbox.recv()).refusal
    assert placed(place.node(1)) == [1, 1]
    server.wait_ready()


@pytest.mark.parametrize("first", [None, 1])
def test_a_node_that_comes_twice_is_refused_while_the_group_serves(meet: Meet, first: int | None) -> None:
    place = meet(2)
    server = place.server(1)
    assert placed(place.node(1, first)) == [1, 1]
    server.wait_ready()
    reason = "all 2 ranks are taken" if first is None else "another node runs rank 1"
    assert reason in refused(place.node(1, first))
    check_all_serve(server, 2)


def test_last_words_to_an_earlier_server_at_the_address_are_not_heard(meet: Meet) -> None:
    """Engines of a node whose server was restarted send to the new one until they notice."""
    place = meet(2)
    server = place.server(1)
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.connect(f"tcp://{place.front}")
        stranger.send(encode(Ready(ModelInfo("another", "", 1, 1), rank=1, inbox="tcp://127.0.0.1:1", version="0")))
        stranger.send(encode(Dead("the old one", rank=1)))
        time.sleep(1.0)
        assert placed(place.node(1)) == [1, 1]
        server.wait_ready()
        stranger.send(b"of another version")
        check_all_serve(server, 2)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_that_goes_before_all_have_joined_ends_the_start(meet: Meet, number: signal.Signals) -> None:
    place = meet(3)
    server, node = place.server(1), place.node(1)
    assert placed(node) == [1, 1]
    os.kill(node.process.pid, number)
    assert server.wait() == 1
    assert re.search(r"the node at tcp://127.0.0.1:\d+ that runs rank 1 has gone", "".join(server.log))


def test_an_engine_that_dies_on_a_node_ends_the_start(meet: Meet) -> None:
    place = meet(3)
    server, node = place.server(1), place.node(1)
    assert placed(node) == [1, 1]
    wait_until(node.children, "its engine to start")
    os.kill(node.engine_pid(), signal.SIGKILL)
    assert server.wait() == 1
    assert "that runs rank 1 has gone" in "".join(server.log)
    assert node.wait() == 1
    assert "killed by signal 9" in "".join(node.log)


@pytest.mark.long
def test_ranks_that_nobody_runs_are_named(meet: Meet) -> None:
    place = meet(4, join_timeout_s=6)
    server, node = place.server(1), place.node(1)
    assert server.wait() == 1
    assert "data_parallel_size: ranks 2, 3 of 4 did not come within 6 s" in "".join(server.log)
    assert node.wait() == 1


def test_a_node_does_not_wait_for_its_server_for_ever(meet: Meet) -> None:
    said = refused(meet(2, join_timeout_s=1).node(1))
    assert "data_parallel_address, data_parallel_rpc_port: no server answers at 127.0.0.1" in said


@pytest.mark.long
def test_ranks_that_share_experts_may_come_in_any_order(models: Models, alone: Alone) -> None:
    """Three ranks share four experts; the nodes are started first, and know no ranks."""
    meeting = ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(free_port())]
    flags = command(models, *meeting, "--data-parallel-size-local", "1")
    flags[flags.index("--data-parallel-size") + 1] = "3"
    nodes = [Server([*flags, "--headless"]) for _ in range(2)]
    server = Server(flags)
    try:
        server.wait_ready()
        for rank in range(3):
            fields = {"prompt": [rank + 3, 7, 9], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
            reply = server.post(COMPLETIONS, {**fields, "return_token_ids": True}, {"X-data-parallel-rank": str(rank)})
            assert tuple(reply.json["choices"][0]["token_ids"]) == alone([rank + 3, 7, 9], 20)
        server.terminate()
        assert [each.wait() for each in (server, *nodes)] == [0, 0, 0]
    finally:
        end([server, *nodes])
