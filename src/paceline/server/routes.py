# SPDX-License-Identifier: Apache-2.0
"""The endpoints."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.server.errors import ApiError, bad_request
from paceline.server.formats import ChatFormat, CompletionFormat, Format
from paceline.server.generate import EventStream, begin, whole
from paceline.server.jobs import Job, Prompt, encode, new_id
from paceline.server.replies import (
    DetokenizeReply,
    ModelCard,
    ModelList,
    TokenizeReply,
    VersionReply,
)
from paceline.server.requests import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampled,
    TokenizeRequest,
    parse,
)
from paceline.server.sampling import check_ids
from paceline.server.state import ServerState

MAX_BODY_BYTES = 64 << 20
RANK_HEADER = "x-data-parallel-rank"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

Endpoint = Callable[[Request], Awaitable[Response]]


def state_of(request: Request) -> ServerState:
    """The server's state."""
    state: ServerState = request.app.state.server
    return state


def reply(body: msgspec.Struct) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(body), media_type="application/json")


async def read_body(request: Request) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413: it is larger than any prompt.
    """
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes")
    return b"".join(parts)


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    arrival, state = time.monotonic(), state_of(request)
    body = parse(await read_body(request), CompletionRequest)
    if body.echo and body.logprobs is not None:
        raise bad_request("echo", "cannot be combined with logprobs: those of the prompt are not computed")
    prompts = await _prompts(state, body)
    job = Job(
        state,
        body,
        _response_id("cmpl", request, body),
        prompts,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        arrival=arrival,
    )
    return await _answer(request, job, CompletionFormat(job, num_top=body.logprobs or 0, echo=body.echo))


async def chat(request: Request) -> Response:
    """POST /v1/chat/completions."""
    arrival, state = time.monotonic(), state_of(request)
    body = parse(await read_body(request), ChatRequest)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise bad_request("max_completion_tokens", "give either this or max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs", "needs logprobs: true")
    text = render(state, body.messages, body.add_generation_prompt)
    ids = await encode(state, text, add_special_tokens=body.add_special_tokens)
    num_top = body.top_logprobs or 0
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    job = Job(
        state,
        body,
        _response_id("chatcmpl", request, body),
        [Prompt(ids, text)],
        max_tokens=limit,
        logprobs=num_top if body.logprobs else None,
        arrival=arrival,
    )
    return await _answer(request, job, ChatFormat(job, num_top=num_top))


async def _answer(request: Request, job: Job, form: Format) -> Response:
    job.rank = _rank(request)
    if job.request.stream:
        return EventStream(job, form, begin(job))
    return await whole(job, form, request.receive)


def _response_id(prefix: str, request: Request, body: Sampled) -> str:
    return new_id(prefix, body.request_id or request.headers.get("x-request-id"))


def _rank(request: Request) -> int | None:
    """The data-parallel rank that the client asks for, if it does.

    Raises:
        ApiError: 400: this server has no such rank.
    """
    given = request.headers.get(RANK_HEADER)
    if given is None:
        return None
    ranks = state_of(request).engine.num_ranks
    text = given.strip()
    if not (text.isascii() and text.isdigit() and int(text) < ranks):
        allowed = "0, since this server has one rank" if ranks == 1 else f"a rank from 0 to {ranks - 1}"
        raise bad_request("X-Data-Parallel-Rank", f"must be {allowed}; got {given!r}")
    return int(text)


async def _prompts(state: ServerState, body: CompletionRequest) -> list[Prompt]:
    """The prompts of a completion request, as ids."""
    given = body.prompt
    if isinstance(given, str):
        given = [given]
    if not given:
        raise bad_request("prompt", "is empty")
    kinds = {type(part) for part in given}
    if len(kinds) > 1:
        raise bad_request("prompt", "mixes texts and token ids; give all of one kind")
    if kinds == {int}:
        return [Prompt([part for part in given if isinstance(part, int)])]
    prompts = []
    for part in given:
        if isinstance(part, str):
            ids = await encode(state, part, add_special_tokens=body.add_special_tokens)
            prompts.append(Prompt(ids, part))
        elif isinstance(part, list):
            prompts.append(Prompt(part))
    return prompts


def render(state: ServerState, messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
    """A conversation as the text that the model was trained on.

    Raises:
        ApiError: 400: the model's chat template refuses it, or the model has none.
    """
    plain: list[dict[str, Any]] = []
    for message in messages:
        content = message.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        turn = {"role": message.role, "content": text}
        if message.name is not None:
            turn["name"] = message.name
        plain.append(turn)
    try:
        return state.tokenizer.apply_chat_template(plain, add_generation_prompt=add_generation_prompt)
    except ValueError as error:
        param, _, problem = str(error).partition(": ")
        raise bad_request("messages" if param == "chat_template" else param, problem or param) from None


async def tokenize(request: Request) -> Response:
    """POST /tokenize: a text's or a conversation's token ids."""
    state = state_of(request)
    body = parse(await read_body(request), TokenizeRequest)
    state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("prompt", "give either this or messages")
    if body.messages is not None:
        text, special = render(state, body.messages, body.add_generation_prompt), bool(body.add_special_tokens)
    else:
        text, special = body.prompt or "", body.add_special_tokens is not False
    ids = await encode(state, text, add_special_tokens=special)
    names = [state.token_names(token)[0] for token in ids] if body.return_token_strs else None
    return reply(TokenizeReply(count=len(ids), max_model_len=state.model.max_model_len, tokens=ids, token_strs=names))


async def detokenize(request: Request) -> Response:
    """POST /detokenize: the text of token ids, special tokens included."""
    state = state_of(request)
    body = parse(await read_body(request), DetokenizeRequest)
    state.check_model(body.model)
    check_ids(body.tokens, state.model.vocab_size, "tokens")
    return reply(DetokenizeReply(state.tokenizer.decode(body.tokens, skip_special_tokens=False)))


def _cards(state: ServerState) -> list[ModelCard]:
    return [
        ModelCard(
            id=name,
            created=state.created,
            root=state.model.name,
            max_model_len=state.model.max_model_len,
            vocab_size=state.model.vocab_size,
        )
        for name in state.names
    ]


async def models(request: Request) -> Response:
    """GET /v1/models."""
    return reply(ModelList(data=_cards(state_of(request))))


async def model(request: Request) -> Response:
    """GET /v1/models/{name}."""
    state = state_of(request)
    name = state.check_model(request.path_params["name"])
    return reply(next(card for card in _cards(state) if card.id == name))


async def health(request: Request) -> Response:
    """GET /health, /ping: 200 while new requests are welcome, 503 when not."""
    state = state_of(request)
    if state.ready:
        return Response(status_code=200)
    reason = "shutting down" if state.draining else f"the engine is not running: {state.engine.dead}"
    return ApiError(503, reason).response()


async def version(request: Request) -> Response:
    """GET /version."""
    return reply(VersionReply(__version__))


async def metrics(request: Request) -> Response:
    """GET /metrics, for Prometheus."""
    return Response(state_of(request).metrics.text(), headers={"Content-Type": PROMETHEUS})
