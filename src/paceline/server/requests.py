# SPDX-License-Identifier: Apache-2.0
"""The bodies that clients send, and how they are read.

A field is honoured or refused by name. A field that is null counts as absent. Fields that this server does not
have are accepted with the values that ask for nothing (`NO_OPS`), since clients send those unasked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from paceline.server.errors import bad_request

MAX_CHOICES = 128
"""Of ``n``."""
MAX_LOGPROBS = 20
INT64 = Meta(ge=-(2**63), le=2**63 - 1)
TOKEN_ID = Meta(ge=0, le=2**31 - 1)

Int64 = Annotated[int, INT64]
TokenId = Annotated[int, TOKEN_ID]
Unit = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """``include_usage``: a last chunk with token counts. ``continuous_usage_stats``: counts in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Sampled(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of both generating endpoints; vLLM's names where OpenAI has none.

    Those of sampling reach the engine by `server.sampling.FIELDS`.
    """

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stream_interval: Annotated[int, Meta(ge=1, le=2**31)] = 1
    stop: str | list[str] = []
    seed: Int64 | None = None
    temperature: Annotated[float, Meta(ge=0.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0
    min_p: Unit = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=1e6)] = 1.0
    logit_bias: dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]] = {}
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    # Whom and what the request is for; these change nothing.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(Sampled, kw_only=True):
    """``POST /v1/completions``. ``prompt``: a text, token ids, or a list of either."""

    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: Annotated[int, Meta(ge=1)] = 16
    logprobs: Logprobs | None = None
    echo: bool = False
    add_special_tokens: bool = True


class TextPart(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag_field="type", tag="text"):
    """A piece of a message's text."""

    text: str


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One turn. ``name`` reaches the chat template, which may use it."""

    role: Annotated[str, Meta(min_length=1)]
    content: str | list[TextPart]
    name: str | None = None


class ChatRequest(Sampled, kw_only=True):
    """``POST /v1/chat/completions``. Without ``max_tokens`` an answer may fill the model's context."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Logprobs | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /tokenize``: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[TokenId]


NO_OPS: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_json": (),
    "include_reasoning": (True, False),
    "kv_transfer_params": ({},),
    "length_penalty": (1.0, 1),
    "logprob_token_ids": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}
"""Fields that clients know and this server lacks, with the values (beside null) that ask for nothing.

``tool_choice``, ``parallel_tool_calls``: without tools there is nothing to choose.
"""
_MESSAGE_NO_OPS: Mapping[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning": (),
    "reasoning_content": (),
    "refusal": (),
    "tool_calls": ([],),
}
"""Fields of an answer that clients send back with the conversation."""

_AT = re.compile(r" - at `\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`")
_MISSING = re.compile(r"Object missing required field `([^`]*)`")

T = TypeVar("T", bound=msgspec.Struct)


def parse(body: bytes, kind: type[T]) -> T:
    """Read a request.

    Raises:
        ApiError: 400, naming the field: bad JSON, a wrong type, a value out of range, an unknown field.
    """
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_request(None, f"the body is not valid JSON: {error}") from None
    except ValueError as error:
        raise bad_request(None, f"the body is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise bad_request(None, "the body must be a JSON object")
    fields = _without_no_ops(raw, kind, NO_OPS, "")
    messages = fields.get("messages")
    if isinstance(messages, list):
        fields["messages"] = [
            _without_no_ops(m, ChatMessage, _MESSAGE_NO_OPS, f"messages[{i}].") if isinstance(m, dict) else m
            for i, m in enumerate(messages)
        ]
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None


def _without_no_ops(
    raw: dict[str, Any], kind: type[msgspec.Struct], no_ops: Mapping[str, tuple[Any, ...]], where: str
) -> dict[str, Any]:
    """``raw`` less what is null or asks for nothing."""
    known = kind.__struct_fields__
    fields = {}
    for name, value in raw.items():
        if name in known:
            if value is not None:
                fields[name] = value
        elif name not in no_ops:
            raise bad_request(where + name, "unknown field")
        elif value is not None and not any(value == v and type(value) is type(v) for v in no_ops[name]):
            raise bad_request(where + name, "is not supported")
    return fields


def _named(text: str) -> Exception:
    """msgspec's complaint as an error that names the field."""
    found = _AT.search(text)
    path = found.group(1) if found else ""
    problem = _AT.sub("", text)
    for pattern, words in ((_MISSING, "is required"), (_UNKNOWN, "unknown field")):
        if inner := pattern.match(problem):
            return bad_request(f"{path}.{inner.group(1)}" if path else inner.group(1), words)
    # msgspec writes `[...]` for the keys of a mapping.
    return bad_request(path.replace("[...]", "[]") or None, problem[:1].lower() + problem[1:])
