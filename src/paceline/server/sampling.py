# SPDX-License-Identifier: Apache-2.0
"""From the fields of a request to the engine's `SamplingParams`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from paceline.core.request import SamplingParams
from paceline.engine.messages import ModelInfo
from paceline.server.errors import ApiError, bad_request
from paceline.server.requests import Sampled

TABLE: Mapping[str, str] = {
    name: name
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "min_tokens",
        "stop_token_ids",
        "ignore_eos",
    )
}
"""Request field -> `SamplingParams` field. One that the engine lacks is refused unless it has its default value."""

ENGINE_FIELDS = frozenset(SamplingParams.__struct_fields__)
_DEFAULTS = {field.name: field for field in msgspec.structs.fields(Sampled)}


def sampling_params(
    request: Sampled, model: ModelInfo, *, max_tokens: int, logprobs: int | None, seed: int | None
) -> SamplingParams:
    """What the engine is to do for one choice of ``request``.

    ``max_tokens`` has been cut to what the model's context leaves. ``logprobs``: how many alternatives to report
    per token, None for no log-probabilities at all.

    Raises:
        ApiError: 400: a value that the engine refuses, or a field that it does not have.
    """
    stop = stop_strings(request)
    values: dict[str, Any] = {"max_tokens": max_tokens, "seed": seed, "stop": stop}
    for name, target in TABLE.items():
        value = getattr(request, name)
        if target in ENGINE_FIELDS:
            values[target] = _CONVERSIONS[name](value, model) if name in _CONVERSIONS else value
        elif value != default_of(name):
            raise bad_request(name, "is not supported by this engine")
    if logprobs is not None:
        if "logprobs" not in ENGINE_FIELDS:
            raise bad_request("logprobs", "is not supported by this engine")
        values["logprobs"] = logprobs
    if len(model.eos_token_ids) > 1 and not request.ignore_eos:
        values["stop_token_ids"] = (*values["stop_token_ids"], *model.eos_token_ids[1:])
    if request.min_tokens > max_tokens:
        raise bad_request("min_tokens", f"{request.min_tokens} is more than max_tokens = {max_tokens}")
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise _refused(error) from None


def stop_strings(request: Sampled) -> tuple[str, ...]:
    """``stop``, which may be one text or several."""
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def default_of(name: str) -> Any:
    """The value of a request field that was not given."""
    field = _DEFAULTS[name]
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


def check_ids(ids: list[int], vocab_size: int, where: str) -> None:
    """Refuse ids outside the vocabulary, which would read past the embedding.

    Raises:
        ApiError: 400 for ``where``.
    """
    if ids and max(ids) >= vocab_size:
        position = next(i for i, token in enumerate(ids) if token >= vocab_size)
        raise bad_request(where, f"{ids[position]} at position {position} is not an id below {vocab_size}")


def _stop_token_ids(ids: list[int], model: ModelInfo) -> tuple[int, ...]:
    check_ids(ids, model.vocab_size, "stop_token_ids")
    return tuple(ids)


def _logit_bias(bias: Mapping[str, float], model: ModelInfo) -> dict[int, float] | None:
    if not bias:
        return None
    bad = [key for key in bias if not key.isdecimal() or len(key) > 9]
    if bad:
        raise bad_request("logit_bias", f"{bad[0]!r} is not a token id")
    check_ids([int(key) for key in bias], model.vocab_size, "logit_bias")
    return {int(key): value for key, value in bias.items()}


_CONVERSIONS: Mapping[str, Callable[[Any, ModelInfo], Any]] = {
    "stop_token_ids": _stop_token_ids,
    "logit_bias": _logit_bias,
}


def _refused(error: ValueError) -> ApiError:
    """The engine's own complaint, which begins with the field's name."""
    name, _, problem = str(error).partition(": ")
    return bad_request(name, problem) if problem else bad_request(None, name)
