# SPDX-License-Identifier: Apache-2.0
"""A server for as long as a block needs one: it starts or says why not, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from paceline.bench.served import ServerFailed, server
from tests.server.harness import DEADLINE_S, alive, children, environment, wait_until


def test_a_server_that_does_not_start_is_an_error_with_its_last_words() -> None:
    before = children(os.getpid())
    with (
        pytest.raises(ServerFailed, match="no-such-model"),
        server(("no-such-model",)),
    ):
        raise AssertionError("it is not there")
    assert not any(map(alive, children(os.getpid()) - before))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("ready", [False, True])
def test_interrupted_it_leaves_no_process(ready: bool, number: signal.Signals) -> None:
    program = (
        "import time\n"
        "from paceline.bench.served import server\n"
        "with server(('smollm2',)):\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(1000)"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                          env=environment()) as process:  # fmt: skip
        assert process.stdout is not None
        if ready:
            assert process.stdout.readline() == "ready\n"
        wait_until(lambda: children(process.pid), "the server to start")
        [server] = children(process.pid)
        wait_until(lambda: children(server), "the engine to start")
        started = {server, *children(server)}
        process.send_signal(number)
        assert process.wait(DEADLINE_S) != 0
    wait_until(lambda: not any(map(alive, started)), "the server and its engine to end")
