# SPDX-License-Identifier: Apache-2.0
"""Ports for programs that have to be told where to listen."""

from __future__ import annotations

import itertools
import os
import socket

_PORTS = range(20_000, 30_000, 2)
"""Below those that a system gives to connections of their own accord: nobody takes one between look and use."""

_start = os.getpid() % len(_PORTS)
_ports = itertools.cycle([*_PORTS[_start:], *_PORTS[:_start]])


def free_port() -> int:
    """A port of 127.0.0.1 that nobody uses, as nobody does the next one.

    A port that the system chooses (by binding to 0) will not do: it is free again until the program under test binds
    it, and meanwhile any connection on the machine may get it for its own end.
    """
    return next(port for port in _ports if _is_free(port) and _is_free(port + 1))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
