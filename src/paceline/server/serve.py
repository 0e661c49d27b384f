# SPDX-License-Identifier: Apache-2.0
"""A whole server: starts the engine's process, serves until told to end, and leaves nothing behind."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from paceline.runtime.engine_process import EngineProcess

MODEL_FACTORY = "paceline.runtime.serving:build_engine"


class AddressInUse(OSError):
    """The port cannot be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """How to serve. ``port`` 0: any free one. ``engine``: options of ``factory``, as plain JSON data.

    ``names``: under which the model is served; its own if there are none. ``shutdown_timeout_s``: how long requests
    in flight may take to finish after a signal; None: as long as they need.
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
    # The engine loads while this process imports what it needs for itself.
    process = EngineProcess(options.factory, options.engine)
    try:
        from paceline.server.lifecycle import run

        return run(options, listener, process, say, began)
    except BaseException:
        process.kill()
        raise
    finally:
        listener.close()


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
