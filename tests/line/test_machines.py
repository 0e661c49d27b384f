# SPDX-License-Identifier: Apache-2.0
"""Two machines, for which two network namespaces stand: this host's own name leads to neither of their addresses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

from tests.server.harness import Server, wait_until

SCRIPT = """
set -e
ip link set lo up
unshare --net bash -ec '
    for i in $(seq 200); do ip link show dev west > /dev/null 2>&1 && break; sleep 0.05; done
    ip link set lo up; ip addr add 10.9.0.2/24 dev west; ip link set west up
    exec "$0" -m tests.line.node "$1" 1' "$0" "$2" &
until [ "$(readlink /proc/$!/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.05; done
ip link add name east type veth peer name west netns $!
ip addr add 10.9.0.1/24 dev east; ip link set east up
exec "$0" -m tests.server.program "$1"
"""
NAMESPACE = ["unshare", "--user", "--map-root-user", "--net"]


def can_make_namespaces() -> bool:
    if not all(map(shutil.which, ("unshare", "ip", "bash"))):
        return False
    made = [*NAMESPACE, "unshare", "--net", "true"]
    return subprocess.run(made, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_make_namespaces(), reason="needs user and network namespaces, and ip")
def test_ranks_of_two_machines_meet() -> None:
    place = {
        "size": 2,
        "first": 0,
        "lockstep": True,
        "timeout_s": 30.0,
        "join_timeout_s": 30.0,
        "store": "10.9.0.1:29550",
        "front": "10.9.0.1:29551",
    }
    server = {"engine": {"data_parallel": place}, "data_parallel_size": 1}
    node = {"data_parallel": {**place, "first": None}}
    script = ["bash", "-c", SCRIPT]
    # The server replaces the process that is started here, so that signals reach it.
    launch = "import os, sys; os.execvp(sys.argv[1], [*sys.argv[1:-2], sys.executable, *sys.argv[-2:]])"
    both = Server(["-c", launch, *NAMESPACE, *script, json.dumps(server), json.dumps(node)])
    try:
        both.wait_ready()
        both.terminate()
        assert both.wait() == 0
        assert "running ranks 1 to 1 of 2" in "".join(both.log)
    finally:
        if both.process.poll() is None:
            os.kill(both.process.pid, 9)
            both.process.communicate()
        wait_until(lambda: not both.children(), "the node to end")
