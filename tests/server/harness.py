# SPDX-License-Identifier: Apache-2.0
"""Servers as processes, and a plain HTTP client: what a user has."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(paceline.__file__).parents[1]
DEADLINE_S = 60.0
"""For anything that must happen; nothing is asserted about how soon within it."""


def environment() -> dict[str, str]:
    """The environment of a process that imports this very paceline, and the tests."""
    paths = [str(SOURCES), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


class Server:
    """A server process. ``log``: the lines it has printed so far. ``folder``: its place for temporary files."""

    def __init__(self, command: Sequence[str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="test-"))
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={**environment(), "TMPDIR": str(self.folder)},
        )
        self.log: list[str] = []
        self.port = 0

    def wait_ready(self) -> None:
        """Read the log until the server says where it listens."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            if found := re.search(r"ready at http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found.group(1))
                return
        raise AssertionError(f"the server ended: {''.join(self.log)}")

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def children(self) -> list[int]:
        """Processes that this one started, in that order."""
        return sorted(children(self.process.pid))

    def engine_pid(self) -> int:
        [pid] = self.children()
        return pid

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """The exit status, once nothing is left of the server; the rest of what was printed goes to ``log``."""
        out, _ = self.process.communicate(timeout=DEADLINE_S)
        self.log += out.splitlines(keepends=True)
        self.check_folder()
        return self.process.returncode

    def check_folder(self) -> None:
        """No temporary files may remain."""
        if self.folder.exists():
            wait_until(lambda: not list(self.folder.iterdir()), "temporary files to go")
            self.folder.rmdir()

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Reply:
        return self.ask("GET", path, None, headers)

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask("POST", path, data, headers)

    def ask(self, method: str, path: str, data: bytes | None, headers: Mapping[str, str] | None = None) -> Reply:
        connection = self.connection()
        try:
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return Reply(answer.status, dict(answer.getheaders()), answer.read())
        finally:
            connection.close()

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """A completion, which must succeed."""
        reply = self.post("/v1/completions", {"prompt": prompt, **fields})
        assert reply.status == 200, reply.text
        return reply.json

    def stream(self, path: str, **fields: Any) -> list[Any]:
        """The events of a streamed answer, parsed; the last must be [DONE], which is left out."""
        reply = self.post(path, {"stream": True, **fields})
        assert reply.status == 200, reply.text
        return events(reply.body)

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample of /metrics."""
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(name + "{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no sample {name} with {labels}")

    def wait_metric(self, name: str, value: float, **labels: str) -> None:
        """Wait until a sample has ``value``."""
        wait_until(lambda: self.metric(name, **labels) == value, f"{name} {labels} to be {value}")


@dataclass(frozen=True)
class Reply:
    """An answer as it came."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, whose form is checked."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert error["code"] == self.status
        return dict(error)


def events(body: bytes) -> list[Any]:
    """Server-sent events, parsed; the last must be [DONE], which is left out."""
    parts = body.decode().split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts)
    assert parts.pop() == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def wait_until(condition: Any, what: str) -> None:
    """Wait for ``condition``."""
    ends = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < ends, f"waited in vain for {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs (one that has ended and waits for its parent does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@contextmanager
def running(command: Sequence[str]) -> Iterator[Server]:
    """A server for the duration of the block; it, its engine and its temporary files are gone afterwards."""
    server = Server(command)
    engines: list[int] = []
    try:
        server.wait_ready()
        engines = server.children()
        yield server
        if server.process.poll() is None:
            server.terminate()
            assert server.wait() == 0, server.log
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.communicate()
        wait_until(lambda: not any(map(alive, engines)), "the engine to end")
        server.check_folder()


@contextmanager
def fake_server(engine: Mapping[str, Any] | None = None, **options: Any) -> Iterator[Server]:
    """A server with the fake engine; ``options`` are those of `ServeOptions`."""
    with running(["-m", "tests.server.program", json.dumps({"engine": dict(engine or {}), **options})]) as server:
        yield server


def children(pid: int) -> set[int]:
    """Processes that ``pid`` has started and that are there."""
    done = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return {int(child) for child in done.stdout.split()}
