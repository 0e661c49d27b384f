# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's own HTTP server, from the PyPI package xllamacpp.

    python tools/peers/llamacpp_server.py MODEL.gguf PORT SLOTS TOKENS_PER_SLOT

Its defaults, and as many slots as requests that come at once: one slot would serve them one after the other. Runs in
an environment of its own; imports nothing of paceline.
"""

from __future__ import annotations

import signal
import sys

import xllamacpp


def main(model: str, port: int, slots: int, tokens_per_slot: int) -> None:
    """Serve until SIGTERM or SIGINT."""
    ends = {signal.SIGTERM, signal.SIGINT}
    # Before the server's threads start, so that they inherit it.
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.port = port
    params.n_parallel = slots
    params.n_ctx = slots * tokens_per_slot
    server = xllamacpp.Server(params)
    print(f"llama.cpp ({xllamacpp.__version__}) listens on {server.listening_address}", flush=True)
    signal.sigwait(ends)


if __name__ == "__main__":
    main(sys.argv[1], *(int(argument) for argument in sys.argv[2:5]))
