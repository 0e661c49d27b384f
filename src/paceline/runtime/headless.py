# SPDX-License-Identifier: Apache-2.0
"""Ranks without a server of their own: the one that runs rank 0 serves them, from another machine."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import zmq

from paceline import __version__
from paceline.engine.messages import Arrival, decode_placed, encode
from paceline.runtime.engine_group import STOP_TIMEOUT_S, EngineFailed, EngineRefused, Place, start_processes
from paceline.runtime.engine_process import EngineProcess, own_address, parting, push_or_pull

POLL_MS = 200
LEAVING_S = 2.0
"""How long ranks whose server has gone may take to end by themselves."""


def run_headless(factory: str, options: Mapping[str, Any], ranks: int, say: Callable[[str], None]) -> int:
    """Run ``ranks`` engine processes for a server elsewhere, until they have ended; the exit status.

    They end together: told by the server, or when it is gone, or when one of them is.

    Args:
        factory, options: see `start_processes`; ``data_parallel`` holds ``size``, ``first`` and ``front``.
        say: is told what an operator should read.

    Raises:
        EngineRefused: the server has no place for these ranks.
        EngineFailed: the server did not come, or left.
    """
    place = Place.of(options, ranks)
    outbox = f"tcp://{place.front}"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    processes: list[EngineProcess] = []
    folder = None
    try:
        probe, lost = _connection(context, outbox)
        # Open until the end: the server sees by it that this node is there.
        answer = push_or_pull(context, zmq.PULL)
        say(f"asking the server at {place.front} for {ranks} of {place.size} ranks")
        first = _ask(place, ranks, probe, lost, answer)
        folder = Path(tempfile.mkdtemp(prefix="paceline-"))
        names = {first + number: f"inbox-{number}" for number in range(ranks)}
        processes = start_processes(factory, options, place, names, outbox, folder)
        say(f"running ranks {first} to {first + ranks - 1} of {place.size} for the server at {place.front}")
        while not (gone := bool(lost.poll(POLL_MS))) and not any(process.ended for process in processes):
            pass
        probe.close()
        # A server that ends in order has told them to; in lock-step all leave when one does.
        if not _all_ended(processes, LEAVING_S if gone else STOP_TIMEOUT_S) and gone:
            say(f"the server at {place.front} has gone")
        for process in processes:
            if process.status not in (0, None):
                say(process.epitaph())
        return 0 if all(process.status == 0 for process in processes) else 1
    finally:
        for process in processes:
            process.kill()
            process.wait(STOP_TIMEOUT_S)
            process.let_go()
        context.destroy(linger=0)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _ask(
    place: Place,
    ranks: int,
    probe: zmq.Socket[bytes],
    lost: zmq.Socket[bytes],
    answer: zmq.Socket[bytes],
) -> int:
    """Which rank the first one here is, by the server's word."""
    assert place.front is not None
    host, _, port = place.front.rpartition(":")
    try:
        own = own_address(host.strip("[]"), int(port))
        answer.bind(f"tcp://{own}:*")
    except OSError as error:
        raise EngineRefused(f"data_parallel_address: there is no way to {host}: {error}") from None
    inbox = f"tcp://{own}:{answer.get_string(zmq.LAST_ENDPOINT).rpartition(':')[2]}"
    probe.send(encode(Arrival(ranks, place.size, place.first, place.in_step, inbox, __version__)))
    ends = time.monotonic() + place.join_timeout_s
    while not answer.poll(POLL_MS):
        if lost.poll(0):
            raise EngineFailed(f"the server at {place.front} has gone")
        if time.monotonic() > ends:
            raise EngineFailed(
                f"data_parallel_address, data_parallel_rpc_port: no server answers at {place.front} within"
                f" {place.join_timeout_s:g} s; it is started with the same flags, without --headless"
            )
    placed = decode_placed(answer.recv())
    if placed.refusal:
        raise EngineRefused(placed.refusal)
    return placed.first


def _connection(context: zmq.Context[zmq.Socket[bytes]], outbox: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A connection to ``outbox``, and a socket that becomes readable when it has ended."""
    probe = push_or_pull(context, zmq.PUSH)
    lost = parting(probe)
    probe.connect(outbox)
    return probe, lost


def _all_ended(processes: list[EngineProcess], timeout_s: float) -> bool:
    ends = time.monotonic() + timeout_s
    ended = [process.wait(max(0.0, ends - time.monotonic())) for process in processes]
    return all(ended)
