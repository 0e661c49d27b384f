# SPDX-License-Identifier: Apache-2.0
"""What the routes share, and who may come in."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from paceline import __version__
from paceline.engine.aio import AsyncEngine
from paceline.engine.messages import ModelInfo
from paceline.server.errors import RETRY_LATER_S, RETRY_SOON_S, ApiError, unavailable
from paceline.server.metrics import Metrics
from paceline.server.text import TextTokenizer, TokenNames


@dataclass(slots=True)
class ServerState:
    """One server. ``names``: under which the model is served, the first of them in answers.

    ``max_num_queued_reqs``: requests in flight, waiting and running, above which new ones are refused.
    ``draining``: the server has been told to end; who is in may finish, nobody new comes in.
    """

    engine: AsyncEngine
    tokenizer: TextTokenizer
    model: ModelInfo
    names: tuple[str, ...]
    metrics: Metrics
    api_keys: tuple[str, ...] = ()
    max_num_queued_reqs: int | None = None
    stream_interval: int = 1
    draining: bool = False
    in_flight: int = 0
    """HTTP requests that generate, from their admission until the last byte of the answer."""
    created: int = field(default_factory=lambda: int(time.time()))
    fingerprint: str = f"paceline-{__version__}"
    token_names: TokenNames = field(init=False)
    _ids: itertools.count[int] = field(default_factory=itertools.count, init=False)

    def __post_init__(self) -> None:
        self.token_names = TokenNames(self.tokenizer)

    @property
    def ready(self) -> bool:
        """Whether new requests are welcome."""
        return not self.draining and self.engine.dead is None

    def next_id(self) -> str:
        """A name for a request in the engine."""
        return str(next(self._ids))

    def check_model(self, name: str | None) -> str:
        """The name to answer with.

        Raises:
            ApiError: 404: no model of that name is served.
        """
        if name is not None and name not in self.names:
            raise ApiError(404, f"model: {name!r} is not served here; {', '.join(self.names)} is", "model")
        return name or self.names[0]

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While an answer is being written."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def admit(self, choices: int) -> None:
        """Let in a request that asks for ``choices`` completions.

        Raises:
            ApiError: 503, with Retry-After: the server is ending, its engine is gone, or the queue is full.
        """
        if self.draining:
            raise unavailable("the server is shutting down and takes no new requests", RETRY_LATER_S)
        if self.engine.dead is not None:
            raise unavailable(f"the engine is not running: {self.engine.dead}", RETRY_LATER_S)
        limit = self.max_num_queued_reqs
        if limit is not None and self.engine.in_flight + choices > limit:
            self.metrics.rejected()
            raise unavailable(
                f"{self.engine.in_flight} of at most {limit} requests are in flight (--max-num-queued-reqs),"
                f" no room for {choices} more",
                RETRY_SOON_S,
            )
