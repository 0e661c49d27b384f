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

from paceline.runtime.engine_group import STOP_TIMEOUT_S, Place, start_processes
from paceline.runtime.engine_process import EngineProcess, parting, push_or_pull

POLL_MS = 200
LEAVING_S = 2.0
"""How long ranks whose server has gone may take to end by themselves."""


def run_headless(factory: str, options: Mapping[str, Any], ranks: int, say: Callable[[str], None]) -> int:
    """Run ``ranks`` engine processes for a server elsewhere, until they have ended; the exit status.

    They end together: told by the server, or when it is gone, or when one of them is.

    Args:
        factory, options: see `start_processes`; ``data_parallel`` holds ``size``, ``first`` and ``front``.
        say: is told what an operator should read.
    """
    place = Place.of(options, ranks)
    outbox = f"tcp://{place.front}"
    folder = Path(tempfile.mkdtemp(prefix="paceline-"))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    processes: list[EngineProcess] = []
    try:
        probe, lost = _connection(context, outbox)
        names = {place.first + number: f"inbox-{number}" for number in range(ranks)}
        processes = start_processes(factory, options, place, names, outbox, folder)
        last = place.first + ranks - 1
        say(f"running ranks {place.first} to {last} of {place.size} for the server at {place.front}")
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
        shutil.rmtree(folder, ignore_errors=True)


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
