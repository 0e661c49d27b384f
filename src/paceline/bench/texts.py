# SPDX-License-Identifier: Apache-2.0
"""Token ids made text for the benchmark's prompts, by the server's own tokenizer or by one read from files."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import aiohttp
from numpy.random import Generator

from paceline.bench.client import Client, Refused, ServerUnavailable
from paceline.core.config import ConfigError

FIT_TRIES = 10
SERVER_VOCAB_SIZE = 32000
"""Ids below this are in the vocabulary of nearly every model; a server does not say how large its own is."""
AT_A_TIME = 32
_PROBE = "a"


class LocalTokenizer(Protocol):
    """A tokenizer in this process. ``num_special``: tokens that it puts around every prompt."""

    vocab_size: int
    special_ids: frozenset[int]
    num_special: int

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def chat(self, text: str) -> str:
        """One turn of a user in the model's chat template; ValueError if there is none."""
        ...


class Texts(Protocol):
    """What prompts need of a tokenizer. ``special_ids`` are kept out of random prompts."""

    vocab_size: int
    special_ids: frozenset[int]
    num_special: int

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    async def decode(self, ids: list[int]) -> str: ...

    async def chat(self, text: str) -> str | list[int]:
        """One turn of a user in the model's chat template, as text or as ids."""
        ...


class LocalTexts:
    """By a tokenizer in this process."""

    def __init__(self, tokenizer: LocalTokenizer, vocab_size: int | None) -> None:
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self.special_ids = tokenizer.special_ids
        self.num_special = tokenizer.num_special
        self._tokenizer = tokenizer

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    async def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)

    async def chat(self, text: str) -> str:
        try:
            return self._tokenizer.chat(text)
        except ValueError as error:
            raise ConfigError("tokenizer", f"{error}; --skip-chat-template sends prompts as they are") from None


class ServerTexts:
    """By the server's /tokenize and /detokenize, as vLLM and paceline have them."""

    special_ids: frozenset[int] = frozenset()

    def __init__(self, client: Client, model: str, num_special: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.num_special = num_special
        self._client = client
        self._model = model
        self._turns = asyncio.Semaphore(AT_A_TIME)

    @classmethod
    async def of(cls, client: Client, model: str, vocab_size: int | None) -> ServerTexts:
        """Ask the server how many special tokens a prompt gets.

        Raises:
            ServerUnavailable: it has no such endpoint.
        """
        texts = cls(client, model, 0, SERVER_VOCAB_SIZE if vocab_size is None else vocab_size)
        with_special = await texts.encode(_PROBE, add_special_tokens=True)
        texts.num_special = len(with_special) - len(await texts.encode(_PROBE, add_special_tokens=False))
        return texts

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return await self._tokenize({"prompt": text, "add_special_tokens": add_special_tokens})

    async def decode(self, ids: list[int]) -> str:
        return str(await self._ask("/detokenize", {"tokens": ids}, "prompt"))

    async def chat(self, text: str) -> list[int]:
        return await self._tokenize({"messages": [{"role": "user", "content": text}]})

    async def _tokenize(self, fields: dict[str, Any]) -> list[int]:
        return list(await self._ask("/tokenize", fields, "tokens"))

    async def _ask(self, path: str, fields: dict[str, Any], key: str) -> Any:
        try:
            async with self._turns:
                reply = await self._client.post(path, {"model": self._model, **fields})
            return reply[key]
        except (Refused, aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
            raise ServerUnavailable(
                f"the server's {path} cannot be used for the prompts ({error}): name the model's tokenizer with"
                " --tokenizer (a folder with tokenizer.json, a .gguf file, or smollm2), or send token ids with"
                " --prompt-token-ids"
            ) from None


async def fit(texts: Texts, ids: list[int], allowed: Sequence[int], rng: Generator) -> tuple[str, list[int]]:
    """A text of as many tokens as ``ids`` has, near theirs, and the tokens that it has in the end.

    Decoded ids do not always encode to as many again. What is too long is cut, what is too short is filled up with
    ids of ``allowed`` that ``rng`` draws, at most `FIT_TRIES` times.
    """
    target = len(ids)
    for tries in range(FIT_TRIES + 1):
        text = await texts.decode(ids)
        ids = await texts.encode(text, add_special_tokens=False)
        if len(ids) == target or tries == FIT_TRIES:
            break
        if len(ids) < target:
            ids += [allowed[i] for i in rng.integers(0, len(allowed), size=target - len(ids))]
        else:
            ids = ids[:target]
    return text, ids
