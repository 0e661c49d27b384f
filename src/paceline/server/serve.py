# SPDX-License-Identifier: Apache-2.0
"""A whole server: starts the engines' processes, serves until told to end, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

from paceline.runtime.engine_group import EngineGroup
from paceline.runtime.ray_group import RayGroup

MODEL_FACTORY = "paceline.runtime.serving:build_engine"
ENDING = (signal.SIGINT, signal.SIGTERM)


class AddressInUse(OSError):
    """The port cannot be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """How to serve. ``port`` 0: any free one. ``engine``: options of ``factory``, as plain JSON data.

    ``names``: under which the model is served; its own if there are none. ``shutdown_timeout_s``: how long requests
    in flight may take to finish after a signal; None: as long as they need. ``data_parallel_size``: engine processes
    among which requests are shared out; ``data_parallel_backend``: whether this machine runs them, or a Ray cluster.
    ``patience_s``: how long the engines may load before that is said.
    """

    engine: Mapping[str, Any]
    factory: str = MODEL_FACTORY
    host: str = "127.0.0.1"
    port: int = 8000
    names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_num_queued_reqs: int | None = None
    stream_interval: int = 1
    shutdown_timeout_s: float | None = None
    data_parallel_size: int = 1
    data_parallel_backend: Literal["mp", "ray"] = "mp"
    patience_s: float = 10.0


def serve(options: ServeOptions, say: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT; the exit status. ``say`` is told what an operator should read.

    Raises:
        AddressInUse: host and port cannot be bound.
        EngineRefused: the engine's options cannot be honoured.
        EngineFailed: the engine ended before it was ready.
    """
    began = time.monotonic()
    listener = bind(options.host, options.port)
    # Until the server takes this over, the signal that ends it must not leave an engine behind.
    signal.signal(signal.SIGTERM, _leave)
    engines = None
    try:
        with _signals_held():
            # The engines load while this process imports what it needs for itself.
            group = EngineGroup if options.data_parallel_backend == "mp" else RayGroup
            engines = group(options.factory, options.engine, options.data_parallel_size)
            # Within the block, since what a handler raises amid an import can be lost: import locks have callbacks, and
            # exceptions in these are ignored.
            from paceline.server.lifecycle import run

        return run(options, listener, engines, say, began)
    except BaseException:
        if engines is not None:
            engines.kill()
        raise
    finally:
        listener.close()


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """A signal that ends the server takes effect at the end of the block: a process that is being started is held by
    nobody yet, and would stay behind.

    Not by a mask: another thread that does not block the signal would take it, and it would be raised here at once.
    """
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for late in came:
        signal.raise_signal(late)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: clients are refused until there is somebody to answer.

    Raises:
        AddressInUse: it cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise AddressInUse(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    return listener
