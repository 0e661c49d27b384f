# SPDX-License-Identifier: Apache-2.0
"""From a ready engine to a drained server, whatever comes between.

What ends it, and how:

    SIGTERM, SIGINT   readiness off and new requests refused at once; requests in flight finish; then exit
    once more         what is in flight ends in an error event; exit
    engine dies       every open stream ends in an error event; /health and new requests answer 503 from then on;
                      one of several ranks takes the others along, and all their servers end with status 1
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
import uvloop

from paceline import __version__
from paceline.engine.aio import AsyncEngine
from paceline.engine.messages import Dead, ModelInfo
from paceline.runtime.engine_group import EngineGroup
from paceline.runtime.frontend import load_tokenizer
from paceline.server.app import build_app
from paceline.server.metrics import Metrics
from paceline.server.serve import ServeOptions
from paceline.server.state import ServerState

KEEP_ALIVE_S = 30
BACKLOG = 2048
DRAIN_POLL_S = 0.02
LAST_EVENTS_S = 2.0
"""How long streams that were cut off may take to deliver their last event."""
LAST_OUTPUTS_S = 0.05
"""How long outputs that an engine sent before it died may still be under way."""
LAST_ANSWERS_S = 1.0
"""How long a server whose ranks have died says so before it ends."""
STILL_LOADING = "still loading; the first start on a machine also compiles kernels, once, for half a minute or more"

Say = Callable[[str], None]


def run(options: ServeOptions, listener: socket.socket, engines: EngineGroup, say: Say, began: float) -> int:
    """Serve on ``listener`` with ``engines``; returns the exit status when drained."""
    if engines.awaited:
        say(f"waiting for {engines.awaited} ranks of other machines at {engines.front}")
    patience = threading.Timer(options.patience_s, say, (STILL_LOADING,))
    patience.daemon = True
    patience.start()
    try:
        model = engines.wait_ready()
    finally:
        patience.cancel()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(_serve(options, listener, engines, model, say, began))
    if engines.needed_elsewhere and not status:
        say("waiting for requests of the group's other servers; a signal ends them")
    engines.stop(options.shutdown_timeout_s)
    return status


async def _serve(
    options: ServeOptions, listener: socket.socket, engines: EngineGroup, model: ModelInfo, say: Say, began: float
) -> int:
    names = options.names or (model.name,)
    metrics = Metrics(names[0], model, len(engines), engines.first_rank)
    engine = AsyncEngine(engines.inboxes, engines.outbox, metrics, size=engines.size, first_rank=engines.first_rank)
    metrics.snapshots = lambda: engine.snapshots
    state = ServerState(
        engine=engine,
        tokenizer=load_tokenizer(model),
        model=model,
        names=names,
        metrics=metrics,
        api_keys=options.api_keys,
        max_num_queued_reqs=options.max_num_queued_reqs,
        stream_interval=options.stream_interval,
    )
    engine.start()
    _watch(engines, engine, state)
    config = uvicorn.Config(
        build_app(state),
        http="httptools",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        # What a slow reader has not taken yet is still delivered, within the same limit.
        timeout_graceful_shutdown=None if options.shutdown_timeout_s is None else math.ceil(options.shutdown_timeout_s),
        backlog=BACKLOG,
    )
    server = DrainingServer(config, state, options.shutdown_timeout_s, say)
    server.on_ready = lambda: say(banner(options, listener, model, names, time.monotonic() - began))

    def failed(reason: str) -> None:
        if engines.size > 1:
            engines.kill_all()
            server.end_soon(reason)
        elif not state.draining:
            say(f"{reason}; answering 503 from now on. Restart the server.")

    engine.on_failure = failed
    engine.on_arrival = engines.admit
    # What has been built lasts as long as the process: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    try:
        await server.serve([listener])
    finally:
        engine.close()
    # One engine alone is replaced by whoever saw /health and sent the signal.
    return 1 if engine.failed and (engines.size > 1 or not state.draining) else 0


def _watch(engines: EngineGroup, engine: AsyncEngine, state: ServerState) -> None:
    """Fail what is open when an engine's process ends, however it does."""
    loop = asyncio.get_running_loop()

    def ended(rank: int) -> None:
        def lose() -> None:
            if state.draining and engines.ended_in_order(rank):
                # The group has stopped, since a server of it was told to; nobody had work left.
                engine.fail("the server is shutting down")
            engine.lose(Dead(engines.epitaph(rank), rank=rank))

        # The loop may have ended first: then nobody is left to be told.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(loop.call_later, LAST_OUTPUTS_S, lose)

    engines.watch(ended)


class DrainingServer(uvicorn.Server):
    """A server that, told to end, goes on listening until the requests in flight have finished."""

    def __init__(self, config: uvicorn.Config, state: ServerState, timeout_s: float | None, say: Say) -> None:
        super().__init__(config)
        self._state = state
        self._timeout_s = timeout_s
        self._say = say
        self._hurry = False
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None
        self.on_ready: Callable[[], None] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came; called between two instructions of the main thread."""
        if self._state.draining:
            self._hurry = True
            self.force_exit = self.should_exit
            return
        self._state.draining = True
        self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        if self._state.in_flight:
            self._say(f"shutting down: {self._state.in_flight} requests may finish; a second signal ends them")
        self._draining = asyncio.create_task(self._drain())

    def end_soon(self, reason: str) -> None:
        """The engine is gone for good: say so for a moment, then end."""
        self._say(f"{reason}; answering 503 for {LAST_ANSWERS_S:g} s, then ending")
        self._loop.call_later(LAST_ANSWERS_S, self._end)

    def _end(self) -> None:
        # Whoever has not taken its last event by now does not read.
        self.force_exit = bool(self._state.in_flight)
        self.should_exit = True

    async def _drain(self) -> None:
        began, limit = time.monotonic(), self._timeout_s
        while self._state.in_flight and not self._hurry:
            if limit is not None and time.monotonic() - began > limit:
                break
            await asyncio.sleep(DRAIN_POLL_S)
        if self._state.in_flight:
            self._state.engine.fail("the server is shutting down")
            ends = time.monotonic() + LAST_EVENTS_S
            while self._state.in_flight and time.monotonic() < ends:
                await asyncio.sleep(DRAIN_POLL_S)
            self.force_exit = bool(self._state.in_flight)
        self.should_exit = True


def banner(
    options: ServeOptions, listener: socket.socket, model: ModelInfo, names: tuple[str, ...], seconds: float
) -> str:
    """What an operator reads when the server is ready."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{shown}:{port}"
    tokens = (model.num_blocks - 1) * model.block_size
    drafts = model.num_speculative_tokens
    asked = "cudagraph_mode" in (options.engine.get("compilation_config") or {})
    key = " -H 'Authorization: Bearer KEY'" if options.api_keys else ""
    ranks = options.data_parallel_size
    lines = [
        f"paceline {__version__} is ready at {url} ({seconds:.1f} s)",
        f"  model      {', '.join(names)} ({model.dtype}), up to {model.max_model_len} tokens a request",
        *([f"  ranks      {ranks}, each with a KV cache and a queue of its own"] if ranks > 1 else []),
        f"  KV cache   {tokens} tokens in blocks of {model.block_size},"
        f" prefix caching {'on' if model.enable_prefix_caching else 'off'}",
        f"  drafts     {f'{drafts} a step' if drafts else 'off'}",
        f"  graphs     {model.cudagraph_mode}{'' if asked else ', the default for this model'}",
        f"  OpenAI API {url}/v1    metrics {url}/metrics    description {url}/openapi.json",
        f"  try        curl {url}/v1/completions{key}"
        f""" -d '{{"prompt": "The capital of France is", "max_tokens": 16}}'""",
    ]
    return "\n".join([*lines, *(f"  warning    {warning}" for warning in model.warnings)])
