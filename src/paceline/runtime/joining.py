# SPDX-License-Identifier: Apache-2.0
"""How an engine process becomes a rank in lock-step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from paceline import __version__
from paceline.core.config import EngineConfig, require
from paceline.engine.line import VoteExchange
from paceline.models.experts import ExpertExchange
from paceline.models.spec import LoadedModel
from paceline.parallel.exchange import GroupExchange, connect
from paceline.parallel.rendezvous import Meeting, Place
from paceline.parallel.shared import SharedExchange
from paceline.parallel.votes import GlooVotes, SharedVotes
from paceline.runtime.engine_process import InStep

SAMPLED_TOKENS = 8
"""Embeddings that stand for the weights when ranks compare their models."""


class JoinedLine:
    """A rank's way into its line: meet the others, load, compare, go."""

    def __init__(self, place: Mapping[str, Any], device: torch.device) -> None:
        names = ("size", "rank", "store", "inbox", "timeout_s", "join_timeout_s")
        self._place = Place(**{name: place[name] for name in names if name in place})
        self._meeting = Meeting(self._place, device)
        # Ranks that meet in a file have one supervisor, who sees a rank die before any deadline would. Others meet by
        # collectives of the network, which end when a peer does.
        self._supervised = self._place.store.startswith("/")
        self.exchange: ExpertExchange
        if device.type != "cpu":
            self.exchange = GroupExchange(gather=True, roll=self._meeting)
        else:
            self.exchange = (
                connect(self._place.join_timeout_s) if self._supervised else GroupExchange(roll=self._meeting)
            )

    @property
    def size(self) -> int:
        return self._place.size

    @classmethod
    def join(cls, place: Mapping[str, Any], device: torch.device) -> JoinedLine | None:
        """Meet the other ranks of ``place`` (see `runtime.engine_group`); None where there is nobody to keep step with.

        ``enable_expert_parallel``: the ranks share experts. ``lockstep``: they keep step although they share nothing.
        Independent replicas of a model do not coordinate at all. ``device``: where this rank computes.
        """
        shares = place.get("enable_expert_parallel") or place.get("lockstep")
        return cls(place, device) if shares and place.get("size", 1) > 1 else None

    def least(self, value: int) -> int:
        """The least ``value`` of all ranks."""
        numbers = torch.tensor(value)
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        return int(numbers)

    def begin(self, loaded: LoadedModel, config: EngineConfig) -> InStep:
        """Wait until all ranks have loaded; make sure that they are one engine.

        Raises:
            ConfigError: they differ; the message says in what.
            PeerLost: one did not come.
        """
        if isinstance(self.exchange, SharedExchange):
            experts, tokens = loaded.model.config.experts, config.scheduler.max_num_batched_tokens
            room = self.exchange.room(loaded.model.config.hidden_size, 0 if experts is None else experts.top_k)
            require(tokens <= room, "max_num_batched_tokens", f"ranks exchange at most {room} at once, got {tokens}")
        # The votes need all ranks within the deadline of collectives, so none may still be loading.
        peers = self._meeting.compare(facts(loaded, config))
        return InStep(votes=self._votes(), peers=peers)

    def _votes(self) -> VoteExchange:
        if isinstance(self.exchange, SharedExchange):
            return SharedVotes(self.exchange.board, self._place.timeout_s)
        return GlooVotes(self._place.timeout_s, self._meeting, join_timeout_s=self._place.join_timeout_s)


def facts(loaded: LoadedModel, config: EngineConfig) -> dict[str, Any]:
    """What must be the same on all ranks, as JSON data. A few embeddings stand for the weights."""
    model = loaded.model
    with torch.inference_mode():
        sample = model.embed(torch.arange(min(SAMPLED_TOKENS, model.config.vocab_size), device=model.device))
    return {
        "version": __version__,
        "model": {
            "dtype": str(model.dtype),
            "quantization": model.quantization,
            "embeddings": hashlib.blake2b(sample.float().cpu().numpy().tobytes(), digest_size=8).hexdigest(),
            **{name: str(value) for name, value in asdict(model.config).items()},
        },
        "config": {
            room: {name: str(value) for name, value in values.items()} for room, values in asdict(config).items()
        },
    }
