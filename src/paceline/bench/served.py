# SPDX-License-Identifier: Apache-2.0
"""A ``paceline serve`` process for as long as somebody needs one."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import IO

READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.05
PACELINE = (sys.executable, "-m", "paceline")
_READY = re.compile(r"ready at (http://127\.0\.0\.1:\d+) \(([\d.]+) s\)")


class ServerFailed(RuntimeError):
    """The server did not get ready; the message is what it said last."""


@contextlib.contextmanager
def server(arguments: Sequence[str], timeout_s: float = READY_TIMEOUT_S) -> Iterator[tuple[str, float]]:
    """``paceline serve --port 0`` with ``arguments`` for the duration of the block: address, seconds until ready.

    However the block ends, SIGTERM included, the server and its engines are gone afterwards.

    Raises:
        ServerFailed: it is not ready in time, or ends by itself.
    """
    with tempfile.TemporaryFile("w+", prefix="paceline-server-") as log, exit_on_sigterm():
        process = subprocess.Popen(
            [*PACELINE, "serve", *arguments, "--port", "0"], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            yield _wait_ready(process, log, timeout_s)
        finally:
            _stop(process)


def _wait_ready(process: subprocess.Popen[bytes], log: IO[str], timeout_s: float) -> tuple[str, float]:
    ends = time.monotonic() + timeout_s
    while True:
        # Whether it runs is asked first: what an ended server said is all in the log.
        running = process.poll() is None
        log.seek(0)
        said = log.read()
        if found := _READY.search(said):
            return found.group(1), float(found.group(2))
        if not running or time.monotonic() > ends:
            last = said.strip().splitlines()[-1:] or ["nothing"]
            raise ServerFailed(f"the server did not get ready; it said last: {last[0]}")
        time.sleep(POLL_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL if that takes too long or we are interrupted; the engine ends with its server."""
    try:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)
    except BaseException as error:
        process.kill()
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the program like an exception within the block, so that whoever has to clean up does."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
