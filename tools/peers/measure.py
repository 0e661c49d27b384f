# SPDX-License-Identifier: Apache-2.0
"""One server measured: started, loaded at each concurrency by `paceline bench serve`, weighed, ended."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.peers.servers import Server, ServerFailed, running, tree_rss_bytes

INPUT_LEN, OUTPUT_LEN = 128, 64
PROMPTS_PER_SLOT = 4
WARM_UPS = 2
LOAD_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Load:
    """What the client saw at one concurrency."""

    output_tok_per_s: float
    median_ttft_ms: float
    median_itl_ms: float


@dataclass(frozen=True, slots=True)
class Record:
    """One server in one round. ``loads`` by concurrency; ``error``: why some are missing."""

    server: str
    round: int
    ready_s: float | None = None
    rss_bytes: int | None = None
    loads: dict[int, Load] = field(default_factory=dict)
    error: str | None = None


def measure(server: Server, round_: int, concurrency: Sequence[int], logs: Path, tell: Callable[[str], None]) -> Record:
    """Start ``server``, load it, end it; ``tell`` hears of each part as it is done."""
    ready_s, rss_bytes, error = None, None, None
    loads: dict[int, Load] = {}
    try:
        with running(server, logs / f"{server.name.replace(' ', '-')}.log") as up:
            ready_s = up.ready_s
            tell(f"ready after {ready_s:.1f} s")
            for c in concurrency:
                loads[c] = load(up.url, c, seed=1000 * round_ + c)
                tell(f"{c} at a time: {loads[c].output_tok_per_s:.1f} tok/s")
            rss_bytes = tree_rss_bytes(up.pid)
            tell(f"{rss_bytes / 1e9:.2f} GB")
    except ServerFailed as failed:
        error = str(failed)
        tell(f"failed: {error}")
    return Record(server.name, round_, ready_s, rss_bytes, loads, error)


def load(url: str, concurrency: int, seed: int) -> Load:
    """Random prompts of token ids, all at once as far as ``concurrency`` allows; answers of full length.

    The ``seed`` differs from load to load: no prompt may be found in a prefix cache.

    Raises:
        ServerFailed: an answer is missing, or shorter than asked for.
    """
    prompts = PROMPTS_PER_SLOT * concurrency
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        command = [sys.executable, "-m", "paceline", "bench", "serve", "--base-url", url, "--dataset-name", "random"]
        command += ["--random-input-len", str(INPUT_LEN), "--random-output-len", str(OUTPUT_LEN), "--ignore-eos"]
        command += ["--prompt-token-ids", "--request-rate", "inf", "--max-concurrency", str(concurrency)]
        command += ["--num-prompts", str(prompts), "--num-warmups", str(WARM_UPS), "--seed", str(seed)]
        command += ["--save-result", "--result-dir", folder, "--result-filename", "result.json", "--disable-tqdm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LOAD_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ServerFailed(f"the load of {prompts} prompts took more than {LOAD_TIMEOUT_S:.0f} s") from None
        path = Path(folder) / "result.json"
        if not path.exists():
            raise ServerFailed(f"the client failed: {done.stderr.strip() or done.stdout.strip()}")
        result = json.loads(path.read_text(encoding="utf-8"))
    if (result["completed"], result["total_output_tokens"]) != (prompts, prompts * OUTPUT_LEN):
        raise ServerFailed(
            f"{result['completed']} of {prompts} prompts were answered, with {result['total_output_tokens']} of"
            f" {prompts * OUTPUT_LEN} tokens"
        )
    return Load(result["output_throughput"], result["median_ttft_ms"], result["median_itl_ms"])
