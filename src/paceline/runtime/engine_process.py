# SPDX-License-Identifier: Apache-2.0
"""The engine in a process of its own: its program, and the handle by which a front holds it.

The parent keeps the child's standard input open; its end tells the child that the parent is gone, however it went.
Signals that end a server reach the whole process group; the child ignores them, since the parent decides when
the requests in flight have finished.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from paceline.engine.collector import collector_paused
from paceline.engine.messages import Dead, ModelInfo, Ready, decode_from_engine, encode
from paceline.engine.rank import Rank
from paceline.runtime.loop import EngineLoop

LINK = 0
"""The child's end of the pipe that its parent keeps open."""
STOP_TIMEOUT_S = 5.0
"""How long a stopped engine may take to finish the step in flight before it is killed."""
POLL_MS = 50
LAST_WORDS_MS = 1000
"""How long an ending engine tries to deliver what it sent last."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """What a factory gives: a rank ready to run, and what a front must know of its model."""

    rank: Rank
    model: ModelInfo


Factory = Callable[[dict[str, Any]], BuiltEngine]


class EngineRefused(ValueError):
    """The engine cannot be built from these options; the message says why."""


class EngineFailed(RuntimeError):
    """The engine process ended by itself before it was ready."""


class EngineProcess:
    """A child process that builds an engine and runs its loop, held by the process that serves it."""

    def __init__(self, factory: str, options: Mapping[str, Any]) -> None:
        """Start the process; returns at once, while the child loads.

        Args:
            factory: ``module:function``, called in the child with ``options`` (plain JSON data) as a dict.
            options: passed on.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-"))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.inbox = _socket(self._context, zmq.PUSH)
        self.outbox = _socket(self._context, zmq.PULL)
        addresses = {name: f"ipc://{self._folder / name}" for name in ("inbox", "outbox")}
        self.outbox.bind(addresses["outbox"])
        # The engine binds its inbox: a connecting socket queues what is sent before the other side is there.
        self.inbox.connect(addresses["inbox"])
        self._process = subprocess.Popen(
            # What the engine's libraries print must not mix with the output of the command that serves.
            [sys.executable, "-m", "paceline.runtime.engine_process"],
            stdin=subprocess.PIPE,
            stdout=2,
        )
        spec = json.dumps({"factory": factory, "options": dict(options), "folder": str(self._folder), **addresses})
        assert self._process.stdin is not None
        # A child that dies at once is reported by `wait_ready`.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(spec.encode() + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> ModelInfo:
        """Wait until the engine takes requests.

        Raises:
            EngineRefused: the options cannot be honoured.
            EngineFailed: the process ended.
        """
        while True:
            if self.outbox.poll(POLL_MS):
                message = decode_from_engine(self.outbox.recv())
                if isinstance(message, Ready):
                    return message.model
                if isinstance(message, Dead):
                    raise EngineRefused(message.reason) if message.refused else EngineFailed(message.reason)
            elif self._process.poll() is not None:
                raise EngineFailed(self.epitaph())

    def watch(self, ended: Callable[[], None]) -> None:
        """Call ``ended`` from another thread when the process has ended."""

        def wait() -> None:
            self._process.wait()
            ended()

        threading.Thread(target=wait, name="engine-watch", daemon=True).start()

    def epitaph(self) -> str:
        """How the process ended, in words."""
        status = self._process.poll()
        if status is None:
            return "the engine process is running"
        if status < 0:
            return f"the engine process was killed by signal {-status}"
        return f"the engine process ended with status {status}"

    def stop(self) -> None:
        """End the process, which `AsyncEngine.close` has told to stop or which need not be told; free everything."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """End the process at once, wherever it is."""
        self._process.kill()
        self.stop()


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket that neither blocks nor drops, however much piles up."""
    socket = context.socket(kind)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    return socket


def _read_line(descriptor: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(descriptor, 1 << 16)
        if not part:
            raise EOFError("the parent process left before it said what to run")
        line += part
    return line


def _build(spec: Mapping[str, Any]) -> BuiltEngine:
    module, _, function = spec["factory"].partition(":")
    factory: Factory = getattr(importlib.import_module(module), function)
    return factory(spec["options"])


def _leave_with_parent(built: threading.Event) -> None:
    """While the engine is built, nobody else looks at the link."""
    poller = select.poll()
    poller.register(LINK, select.POLLIN)
    while not built.is_set():
        if poller.poll(POLL_MS) and not built.is_set():
            os._exit(1)


def _run(spec: Mapping[str, Any], inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]) -> Dead | None:
    """Build the engine and step until it is told to stop; why it could not go on, if so."""
    built = threading.Event()
    threading.Thread(target=_leave_with_parent, args=(built,), daemon=True).start()
    try:
        engine = _build(spec)
    except (ValueError, OSError, ImportError) as error:
        return Dead(" ".join(str(error).split()), refused=True)
    except Exception as error:
        traceback.print_exc()
        return Dead(f"the engine could not be built: {type(error).__name__}: {error}")
    built.set()
    outbox.send(encode(Ready(engine.model)))
    try:
        with collector_paused():
            EngineLoop(engine.rank, inbox, outbox, LINK).run()
    except Exception as error:
        traceback.print_exc()
        return Dead(f"the engine failed: {type(error).__name__}: {error}")
    return None


def main() -> int:
    """The program of the engine process; its exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    spec = json.loads(_read_line(LINK))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outbox, inbox = _socket(context, zmq.PUSH), _socket(context, zmq.PULL)
    outbox.connect(spec["outbox"])
    inbox.bind(spec["inbox"])
    dead = _run(spec, inbox, outbox)
    if dead is not None:
        outbox.send(encode(dead))
    inbox.close(linger=0)
    # What was sent last still has to leave.
    context.destroy(linger=LAST_WORDS_MS)
    # A parent that was killed could not do this.
    shutil.rmtree(spec["folder"], ignore_errors=True)
    return 0 if dead is None else 2 if dead.refused else 1


if __name__ == "__main__":
    sys.exit(main())
