# SPDX-License-Identifier: Apache-2.0
"""A client's request as what it is to the engine: one request per prompt and choice."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.engine.messages import Add
from paceline.runtime.detokenizer import Decodes
from paceline.server.choice import Choice
from paceline.server.errors import bad_request
from paceline.server.requests import Sampled
from paceline.server.sampling import check_ids, sampling_params, stop_strings
from paceline.server.state import ServerState
from paceline.server.text import Verbatim

MAX_REQUESTS = 4096
"""Choices that one HTTP request may ask for, all prompts together."""
INLINE_CHARACTERS = 4096
"""Longer texts are encoded in a thread, so that nobody waits for them."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to complete; ``text`` is None where it was given as ids."""

    ids: list[int]
    text: str | None = None


class Job:
    """One HTTP request under way.

    ``adds`` and ``choices`` go together, prompt by prompt, ``n`` each; ``by_id`` finds a choice by its engine request.
    ``rank``: the data-parallel rank that all of it goes to, None for any.
    """

    def __init__(
        self,
        state: ServerState,
        request: Sampled,
        response_id: str,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int | None,
        logprobs: int | None,
        arrival: float,
    ) -> None:
        """Check everything and prepare; nothing is sent yet.

        Raises:
            ApiError: 400 or 404, naming the field.
        """
        self.state = state
        self.request = request
        self.model = state.check_model(request.model)
        self.id = response_id
        self.created = int(time.time())
        self.prompts = prompts
        self.scores = logprobs is not None
        self.adds: list[Add] = []
        self.choices: list[Choice] = []
        self.by_id: dict[str, Choice] = {}
        self.rank: int | None = None
        _check(state, request, prompts)
        for prompt in prompts:
            room = state.model.max_model_len - len(prompt.ids)
            # Where max_tokens is more than there is room for, the length ends the output, and it says so.
            tokens = room if max_tokens is None else min(max_tokens, room)
            for i in range(request.n):
                self._prepare(prompt, i, tokens, logprobs, arrival)

    def _prepare(self, prompt: Prompt, i: int, max_tokens: int, logprobs: int | None, arrival: float) -> None:
        state, request = self.state, self.request
        # Choices of one seed must differ from each other, and be the same every time.
        seed = None if request.seed is None else _wrapped(request.seed + i)
        params = sampling_params(request, state.model, max_tokens=max_tokens, logprobs=logprobs, seed=seed)
        engine_id = state.next_id()
        eos = state.model.eos_token_ids
        self.adds.append(
            Add(engine_id, prompt.ids, params, arrival, eos[0] if eos else None, request.priority, request.cache_salt)
        )
        tokenizer: Decodes = state.tokenizer if request.skip_special_tokens else Verbatim(state.tokenizer)
        choice = Choice(
            len(self.choices),
            tokenizer,
            stop_strings(request),
            min_tokens=request.min_tokens,
            include_stop=request.include_stop_str_in_output,
            scores=self.scores,
        )
        self.choices.append(choice)
        self.by_id[engine_id] = choice

    def prompt_of(self, choice: Choice) -> Prompt:
        return self.prompts[choice.index // self.request.n]

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(len(prompt.ids) for prompt in self.prompts)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)


def new_id(prefix: str, given: str | None) -> str:
    """A response's id, from the client's own name for the request if it has one."""
    return f"{prefix}-{given or secrets.token_hex(8)}"


async def encode(state: ServerState, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text."""
    if len(text) <= INLINE_CHARACTERS:
        return state.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(state.tokenizer.encode, text, add_special_tokens=add_special_tokens)


def _wrapped(seed: int) -> int:
    """Into the range of 64 bits with sign."""
    return (seed + 2**63) % 2**64 - 2**63


def _check(state: ServerState, request: Sampled, prompts: Sequence[Prompt]) -> None:
    model = state.model
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options", "is only for stream: true")
    if request.return_tokens_as_token_ids and not getattr(request, "logprobs", None):
        raise bad_request("return_tokens_as_token_ids", "names tokens of logprobs, which were not asked for")
    if request.priority and model.scheduling_policy != "priority":
        raise bad_request("priority", "needs a server started with --scheduling-policy priority")
    if len(prompts) * request.n > MAX_REQUESTS:
        raise bad_request("n", f"{len(prompts)} prompts x n = {request.n} are more than {MAX_REQUESTS} completions")
    for i, prompt in enumerate(prompts):
        where = "prompt" if len(prompts) == 1 else f"prompt[{i}]"
        if not prompt.ids:
            raise bad_request(where, "has no tokens")
        check_ids(prompt.ids, model.vocab_size, where)
        if len(prompt.ids) >= model.max_model_len:
            raise bad_request(
                where,
                f"{len(prompt.ids)} tokens leave no room for output within the model's context of"
                f" {model.max_model_len} tokens (--max-model-len); shorten it",
            )
