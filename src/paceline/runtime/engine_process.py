# SPDX-License-Identifier: Apache-2.0
"""An engine (one rank) in a process of its own: its program, and the handle by which `EngineGroup` holds it.

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
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from paceline import __version__
from paceline.engine.collector import collector_paused
from paceline.engine.line import PeerLost, VoteExchange, WaitTimes, by_a_peer
from paceline.engine.messages import Beat, Dead, ModelInfo, Ready, encode
from paceline.engine.rank import Rank
from paceline.runtime.line import LineLoop
from paceline.runtime.loop import Desk, EngineLoop

LINK = 0
"""The child's end of the pipe that its parent keeps open."""
HEARTBEAT_MS = 1000
SILENCE_MS = 3000
"""The other side of a connection that has been silent for so long has gone."""
POLL_MS = 50
LAST_WORDS_MS = 1000
"""How long an ending engine tries to deliver what it sent last."""
BEAT_INTERVAL_S = 0.5
"""How often the process of a rank shows that it runs; a thread of its own does so, whatever the step is at."""
ORPHAN_S = 1.0
"""How long a rank whose parent has gone may take to end by itself."""


@dataclass(frozen=True, slots=True)
class InStep:
    """What a rank in lock-step needs: the collective that joins votes, and the inboxes of the other ranks."""

    votes: VoteExchange
    peers: Sequence[str]


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """What a factory gives: a rank ready to run, what a front must know of its model, and its line, if it is in one.

    ``close``: called after the last step of a rank that was told to stop.
    """

    rank: Rank
    model: ModelInfo
    line: InStep | None = None
    close: Callable[[], None] | None = None


Factory = Callable[[dict[str, Any]], BuiltEngine]


class EngineProcess:
    """A child process that builds an engine and runs its loop."""

    def __init__(self, spec: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> None:
        """Start the process; returns at once, while the child loads.

        Args:
            spec: plain JSON data: ``factory`` (``module:function``, called in the child with ``options``), ``options``,
                the ``rank`` by which its front knows it, the addresses of its ``inbox`` and of the front's ``outbox``,
                the ``folder`` they lie in, ``reach`` (a ``host:port`` on the way to ranks or fronts of other machines,
                or None), and ``beats``, whether to show signs of life.
            environment: of the child; this process's own by default.
        """
        self._process = subprocess.Popen(
            # What the engine's libraries print must not mix with the output of the command that serves.
            [sys.executable, "-m", "paceline.runtime.engine_process"],
            stdin=subprocess.PIPE,
            stdout=2,
            env=None if environment is None else dict(environment),
        )
        assert self._process.stdin is not None
        # A child that dies at once is noticed by whoever waits for it.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(dict(spec)).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def watch(self, ended: Callable[[], None]) -> None:
        """Call ``ended`` from another thread when the process has ended."""

        def wait() -> None:
            self._process.wait()
            ended()

        threading.Thread(target=wait, name="engine-watch", daemon=True).start()

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""
        return self._process.poll()

    def epitaph(self) -> str:
        """How the process ended, in words."""
        status = self._process.poll()
        if status is None:
            return "the engine process is running"
        if status < 0:
            return f"the engine process was killed by signal {-status}"
        return f"the engine process ended with status {status}"

    def wait(self, timeout_s: float | None) -> bool:
        """Whether the process has ended within ``timeout_s`` (None: it has, for that is waited for)."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def let_go(self) -> None:
        """Close the link: the child ends at its next step, or where it sleeps."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill(self) -> None:
        """End the process at once, wherever it is; also one that is stopped."""
        self._process.kill()


def push_or_pull(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket that neither blocks nor drops, however much piles up."""
    made = context.socket(kind)
    made.set(zmq.SNDHWM, 0)
    made.set(zmq.RCVHWM, 0)
    made.set(zmq.IPV6, 1)
    return made


def parting(connecting: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """A socket that becomes readable when a connection of ``connecting``, which is yet to be made, has ended.

    The other side need not say so: its silence is enough, as when its process is stopped or its machine is gone.
    """
    connecting.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    connecting.set(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    monitor: zmq.Socket[bytes] = connecting.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    return monitor


def _read_line(descriptor: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(descriptor, 1 << 16)
        if not part:
            raise EOFError("the parent process left before it said what to run")
        line += part
    return line


def _build(spec: Mapping[str, Any], inbox: zmq.Socket[bytes]) -> BuiltEngine:
    module, _, function = spec["factory"].partition(":")
    factory: Factory = getattr(importlib.import_module(module), function)
    if spec["reach"] is not None:
        # Ranks of other machines, or of other fronts, reach this one where it reaches theirs.
        host, _, port = spec["reach"].rpartition(":")
        inbox.bind(f"tcp://{own_address(host.strip('[]'), int(port))}:*")
        spec["options"]["data_parallel"]["inbox"] = inbox.get_string(zmq.LAST_ENDPOINT)
    return factory(spec["options"])


def own_address(host: str, port: int) -> str:
    """The address that this machine has in the eyes of ``host``; nothing is sent.

    Raises:
        OSError: ``host`` has no address, or there is no way to it.
    """
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        own = str(probe.getsockname()[0])
    return f"[{own}]" if family == socket.AF_INET6 else own


def _leave_with_parent(built: threading.Event, folder: str) -> None:
    """While the engine is built, nobody else looks at the link."""
    poller = select.poll()
    poller.register(LINK, select.POLLIN)
    while not built.is_set():
        if poller.poll(POLL_MS) and not built.is_set():
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)


@contextlib.contextmanager
def _beating(context: zmq.Context[zmq.Socket[bytes]], spec: Mapping[str, Any]) -> Iterator[None]:
    """Signs of life for whoever watches, from a thread that runs unless the whole process is frozen.

    It also ends the process when the parent has gone while the rank waits for peers, which may have left already.
    """
    over = threading.Event()
    link = select.poll()
    link.register(LINK, select.POLLIN)

    def beat() -> None:
        pulse = push_or_pull(context, zmq.PUSH)
        pulse.connect(spec["outbox"])
        message = encode(Beat(spec["rank"]))
        while not over.wait(BEAT_INTERVAL_S):
            pulse.send(message)
            if link.poll(0) and not over.wait(ORPHAN_S):
                shutil.rmtree(spec["folder"], ignore_errors=True)
                os._exit(1)
        pulse.close(linger=0)

    thread = threading.Thread(target=beat, name="beats", daemon=True)
    if spec["beats"]:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if spec["beats"]:
            thread.join()


def _loop(
    engine: BuiltEngine,
    rank: int,
    own: int,
    context: zmq.Context[zmq.Socket[bytes]],
    inbox: zmq.Socket[bytes],
    outbox: zmq.Socket[bytes],
) -> LineLoop | EngineLoop:
    """``rank``: by which its front knows it; ``own``: of the group."""
    if engine.line is None:
        return EngineLoop(engine.rank, Desk(engine.rank, inbox, outbox, LINK, number=rank))
    peers, partings = [], {}
    others = (other for other in range(len(engine.line.peers) + 1) if other != own)
    for other, address in zip(others, engine.line.peers, strict=True):
        peer = push_or_pull(context, zmq.PUSH)
        if address.startswith("tcp:"):
            # Nobody here watches the processes of other machines, least of all while all sleep.
            partings[parting(peer)] = other
        peer.connect(address)
        peers.append(peer)
    waits = WaitTimes()
    desk = Desk(engine.rank, inbox, outbox, LINK, number=rank, waits=waits, partings=partings)
    return LineLoop(engine.rank, desk, engine.line.votes, peers, waits)


def _run(
    spec: Mapping[str, Any],
    context: zmq.Context[zmq.Socket[bytes]],
    inbox: zmq.Socket[bytes],
    outbox: zmq.Socket[bytes],
) -> Dead | None:
    """Build the engine and step until it is told to stop; why it could not go on, if so."""
    rank = spec["rank"]
    built = threading.Event()
    threading.Thread(target=_leave_with_parent, args=(built, spec["folder"]), daemon=True).start()
    try:
        engine = _build(spec, inbox)
    except PeerLost as error:
        return Dead(str(error), rank=rank, peer_lost=True)
    except (ValueError, OSError, ImportError) as error:
        return Dead(" ".join(str(error).split()), refused=True, rank=rank)
    except Exception as error:
        traceback.print_exc()
        return Dead(f"the engine could not be built: {type(error).__name__}: {error}", rank=rank)
    built.set()
    outbox.send(encode(Ready(engine.model, rank, inbox.get_string(zmq.LAST_ENDPOINT), __version__)))
    try:
        with collector_paused(), _beating(context, spec):
            own = spec["options"].get("data_parallel", {}).get("rank", 0)
            _loop(engine, rank, own, context, inbox, outbox).run()
            if engine.close is not None:
                engine.close()
    except PeerLost as error:
        return Dead(str(error), rank=rank, peer_lost=True)
    except Exception as error:
        traceback.print_exc()
        # A collective on a GPU may fail after the call that began it.
        lost = engine.line is not None and by_a_peer(error)
        return Dead(f"the engine failed: {type(error).__name__}: {error}", rank=rank, peer_lost=lost)
    return None


def main() -> int:
    """The program of the engine process; its exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    spec = json.loads(_read_line(LINK))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outbox, inbox = push_or_pull(context, zmq.PUSH), push_or_pull(context, zmq.PULL)
    outbox.connect(spec["outbox"])
    inbox.bind(spec["inbox"])
    dead = _run(spec, context, inbox, outbox)
    if dead is not None:
        outbox.send(encode(dead))
    inbox.close(linger=0)
    # What was sent last still has to leave.
    context.destroy(linger=LAST_WORDS_MS)
    link = select.poll()
    link.register(LINK, select.POLLIN)
    if link.poll(0):
        # A parent that was killed could not do this.
        shutil.rmtree(spec["folder"], ignore_errors=True)
    status = 0 if dead is None else 2 if dead.refused else 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of collectives whose peers have gone would hold up, or crash, an orderly end of the interpreter.
    os._exit(status)


if __name__ == "__main__":
    main()
