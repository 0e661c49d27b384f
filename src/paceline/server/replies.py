# SPDX-License-Identifier: Apache-2.0
"""The bodies that clients get. Keys and their order are those of vLLM's server, which OpenAI's clients read.

A field that is UNSET is left out; None is written as null.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class Usage(msgspec.Struct, frozen=True):
    """Counts in tokens."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int


def usage(prompt_tokens: int, completion_tokens: int) -> Usage:
    """Counts and their sum."""
    return Usage(prompt_tokens, prompt_tokens + completion_tokens, completion_tokens)


class CompletionLogprobs(msgspec.Struct):
    """One entry per token; ``text_offset`` in characters of the choice's text."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A completion, or a piece of one. ``stop_reason``: the stop string or stop token id that ended it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionReply(msgspec.Struct, kw_only=True):
    """An answer of /v1/completions, or a chunk of one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    """A likely token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """A chosen token and the likely ones at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """One entry per token."""

    content: list[TokenLogprob]


class Message(msgspec.Struct, kw_only=True):
    """An answer, or (without ``role``) a piece of one."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str


class ChatChoice(msgspec.Struct, kw_only=True):
    """An answer."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatReply(msgspec.Struct, kw_only=True):
    """An answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_token_ids: list[int] | None = None


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """A piece of an answer."""

    index: int
    delta: Message
    logprobs: ChatLogprobs | UnsetType | None = UNSET
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """A chunk of a streamed answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType | None = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    """A name under which the model is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "paceline"
    root: str
    parent: str | None = None
    max_model_len: int
    vocab_size: int


class ModelList(msgspec.Struct, kw_only=True):
    """An answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeReply(msgspec.Struct, kw_only=True):
    """An answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeReply(msgspec.Struct):
    """An answer of /detokenize."""

    prompt: str


class VersionReply(msgspec.Struct):
    """An answer of /version."""

    version: str
