# SPDX-License-Identifier: Apache-2.0
"""A request: where its tokens come from, how it is sampled, and where it stands."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache, lru_cache
from hashlib import blake2b
from struct import Struct
from typing import Any, Protocol

import msgspec


class TokenSource(Protocol):
    """Where prompt tokens come from, so that no scheduler ever walks them.

    ``length`` is in tokens. ``tokens`` returns ids of positions [start, stop). ``block_key`` identifies the
    content of block ``index`` for chained hashing: equal content of one kind of source gives equal keys.
    """

    length: int

    def tokens(self, start: int, stop: int) -> Sequence[int]: ...

    def block_key(self, index: int, block_size: int) -> bytes: ...


@cache
def _packer(count: int) -> Callable[..., bytes]:
    return Struct(f"={count}i").pack


def ids_key(ids: Sequence[int]) -> bytes:
    """The content key of stored token ids: four bytes each, in order, as in `Request.output`."""
    return _packer(len(ids))(*ids)


class StoredTokens:
    """A prompt given as ids."""

    __slots__ = ("ids", "length")

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = ids
        self.length = len(ids)

    def tokens(self, start: int, stop: int) -> Sequence[int]:
        return self.ids[start:stop]

    def block_key(self, index: int, block_size: int) -> bytes:
        return ids_key(self.ids[index * block_size : (index + 1) * block_size])


class GeneratedTokens:
    """A synthetic prompt, id of position i = (offset + i) mod vocabulary, as random benchmarks make them."""

    __slots__ = ("length", "offset", "vocab_size")

    def __init__(self, length: int, offset: int, vocab_size: int) -> None:
        self.length = length
        self.offset = offset % vocab_size
        self.vocab_size = vocab_size

    def tokens(self, start: int, stop: int) -> Sequence[int]:
        stop = min(stop, self.length)
        return [(self.offset + i) % self.vocab_size for i in range(start, stop)]

    def block_key(self, index: int, block_size: int) -> bytes:
        first = (self.offset + index * block_size) % self.vocab_size
        return b"generated:%d:%d:%d" % (first, block_size, self.vocab_size)


class TraceTokens:
    """A prompt of a trace that gives a length and one hash id per ``span`` tokens instead of the text."""

    __slots__ = ("hash_ids", "length", "span", "vocab_size")

    def __init__(self, length: int, hash_ids: Sequence[int], span: int, vocab_size: int) -> None:
        self.length = length
        self.hash_ids = hash_ids
        self.span = span
        self.vocab_size = vocab_size

    def tokens(self, start: int, stop: int) -> Sequence[int]:
        stop = min(stop, self.length)
        ids, span = self.hash_ids, self.span
        return [(ids[i // span] * 7919 + i % span) % self.vocab_size for i in range(start, stop)]

    def block_key(self, index: int, block_size: int) -> bytes:
        if self.span % block_size:
            return ids_key(self.tokens(index * block_size, (index + 1) * block_size))
        position = index * block_size
        place = (self.hash_ids[position // self.span], position % self.span, block_size, self.vocab_size)
        return b"trace:%d:%d:%d:%d" % place


def chain_hash(parent: bytes, key: bytes) -> bytes:
    """Hash of a block: its content key chained to its parent's hash (16 bytes of BLAKE2b)."""
    return blake2b(parent + key, digest_size=16).digest()


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How a request's tokens are chosen and when it ends; names, defaults and ranges are vLLM's.

    The order of what happens to the logits of a token: ``logit_bias`` (id to what is added, in [-100, 100]), stop ids
    masked within the first ``min_tokens`` tokens, ``repetition_penalty`` (of prompt and output), ``frequency_penalty``
    and ``presence_penalty`` (of the output); ``temperature``, 0 being greedy; then ``min_p``, ``top_k`` (0 or -1: off)
    and ``top_p``, each on what the one before has left. ``seed`` makes a sampled request repeatable.

    ``stop_token_ids`` end a request with the id included in its output. ``stop`` strings are found in the text by
    whoever detokenises. ``logprobs``: alternatives to report per token beside the token's own log-probability
    (-1: the whole vocabulary), of the distribution before any of the above; None: no log-probabilities.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: must be at least 1, got {self.max_tokens}")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature: must be a finite number of at least 0, got {self.temperature}")
        if any(not s for s in self.stop):
            raise ValueError("stop: an empty string would stop before the first token")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p: must be more than 0 and at most 1, got {self.top_p}")
        _require_int("top_k", self.top_k, -1)
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p: must lie in [0, 1], got {self.min_p}")
        for name, value in (
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ):
            if not -2.0 <= value <= 2.0:
                raise ValueError(f"{name}: must lie in [-2, 2], got {value}")
        if not 0.0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty: must be a finite number above 0, got {self.repetition_penalty}")
        _require_int("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens: {self.min_tokens} is more than max_tokens = {self.max_tokens}")
        for token, bias in (self.logit_bias or {}).items():
            if token < 0 or not -100.0 <= bias <= 100.0:
                raise ValueError(f"logit_bias: needs ids of at least 0 and values in [-100, 100], got {token}: {bias}")
        if self.logprobs is not None:
            _require_int("logprobs", self.logprobs, -1)


def _require_int(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: must be an integer of at least {least}, got {value!r}")


@lru_cache(maxsize=1024)
def _shared(stop_ids: frozenset[int]) -> frozenset[int]:
    """One object for equal stop sets: every step reads them, and few differ."""
    return stop_ids


class State(Enum):
    """Exactly one at a time."""

    WAITING = "waiting"
    LOADING = "loading"  # WAITING_FOR_REMOTE_KV in vLLM
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a request ended; the value is what an OpenAI client sees."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Loading(msgspec.Struct):
    """An asynchronous load under way: what was promised, until when, and how it ended.

    ``tokens``: computed once it arrives, local hit included. ``arrived``: None until the worker reports.
    """

    tokens: int
    deadline: float
    arrived: int | None = None


class Request:
    """One request and the whole of its scheduling state.

    ``computed``: tokens whose KV is in the cache or being written by the step in flight. ``num_tokens``: prompt
    and output. ``max_total``: the token count at which it ends. ``drafts``: proposals to verify next.

    ``tables``: one block table per cache group. ``capacity``: tokens that every table can hold. ``hashed``: full
    blocks already in the prefix index; ``hash_at``: the token count that fills the next one. ``clear_until``: a
    decode row that starts before this needs neither a block nor a hash. ``local_tokens``: what the prefix cache
    provided when it last left the queue or began to load.

    ``fences``: transfers that still read its blocks, until ``fence_deadline`` at most. ``generation``: names its
    transfers, counted up at each preemption and at the end of each load. ``ask``: whether the connector may still
    be asked. ``bad_from``: first block of a load known to be bad.
    """

    __slots__ = (
        "arrival",
        "cache_salt",
        "capacity",
        "clear_until",
        "computed",
        "drafts",
        "eos_token_id",
        "fence_deadline",
        "fences",
        "finish_reason",
        "first_asked",
        "generation",
        "hash_at",
        "hashed",
        "hashes",
        "id",
        "kv_transfer_params",
        "ask",
        "bad_from",
        "loading",
        "local_tokens",
        "max_total",
        "num_preemptions",
        "num_prompt",
        "num_tokens",
        "output",
        "params",
        "priority",
        "seq",
        "source",
        "state",
        "stop_ids",
        "stop_reason",
        "tables",
    )

    def __init__(
        self,
        id: str,
        source: TokenSource,
        params: SamplingParams,
        *,
        arrival: float = 0.0,
        priority: int = 0,
        eos_token_id: int | None = None,
        cache_salt: str | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> None:
        self.id = id
        self.source = source
        self.params = params
        self.arrival = arrival
        self.priority = priority
        self.eos_token_id = eos_token_id
        self.cache_salt = cache_salt
        self.kv_transfer_params = kv_transfer_params
        stops = set(params.stop_token_ids)
        if eos_token_id is not None and not params.ignore_eos:
            stops.add(eos_token_id)
        self.stop_ids = _shared(frozenset(stops))
        self.max_total = source.length + params.max_tokens
        self.num_prompt = source.length
        self.num_tokens = source.length
        # Four bytes a token: as a list of numbers, a thousand requests would not stay in the processor's cache.
        self.output = array("i")
        self.seq = -1
        self.state = State.WAITING
        self.computed = 0
        self.drafts: tuple[int, ...] = ()
        self.tables: list[list[int]] = []
        self.capacity = 0
        self.hashed = 0
        self.hash_at = 1 << 60
        self.clear_until = 0
        self.hashes: list[bytes] = []
        self.ask = True
        self.bad_from = -1
        self.loading: Loading | None = None
        self.local_tokens = 0
        self.fences = 0
        self.fence_deadline = 0.0
        self.generation = 0
        self.first_asked: float | None = None
        self.num_preemptions = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def tokens(self, start: int, stop: int) -> list[int]:
        """Ids of positions [start, stop) of prompt and output."""
        p = self.num_prompt
        ids = list(self.source.tokens(start, min(stop, p))) if start < p else []
        if stop > p:
            ids += self.output[max(0, start - p) : stop - p]
        return ids

    def block_hashes(self, count: int, block_size: int) -> list[bytes]:
        """Chained hashes of the first ``count`` full blocks (kept, and extended when asked for more)."""
        hashes, first = self.hashes, self.num_prompt
        known = len(hashes)
        if known and count == known + 1 and known * block_size >= first:  # the next block of one that decodes
            start = known * block_size - first
            key = self.output[start : start + block_size].tobytes()
            hashes.append(blake2b(hashes[-1] + key, digest_size=16).digest())
            return hashes
        for i in range(known, count):
            start = i * block_size - first
            if start >= 0:
                key = self.output[start : start + block_size].tobytes()
            elif start + block_size <= 0:
                key = self.source.block_key(i, block_size)
            else:
                key = ids_key(self.tokens(start + first, start + first + block_size))
            hashes.append(chain_hash(hashes[-1] if i else (self.cache_salt or "").encode(), key))
        return hashes

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.state.value}, computed {self.computed}/{self.num_tokens})"
