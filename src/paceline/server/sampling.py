# SPDX-License-Identifier: Apache-2.0
"""From the fields of a request to the engine's `SamplingParams`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.core.request import SamplingParams
from paceline.engine.messages import ModelInfo
from paceline.server.errors import ApiError, bad_request
from paceline.server.requests import Sampled

FIELDS = (
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
"""Of a request, which are the engine's under the same names."""


def sampling_params(
    request: Sampled, model: ModelInfo, *, max_tokens: int, logprobs: int | None, seed: int | None
) -> SamplingParams:
    """What the engine is to do for one choice of ``request``.

    ``max_tokens`` has been cut to what the model's context leaves. ``logprobs``: how many alternatives to report
    per token, None for no log-probabilities at all.

    Raises:
        ApiError: 400: a value that the engine refuses.
    """
    stop = stop_strings(request)
    values: dict[str, Any] = {"max_tokens": max_tokens, "seed": seed, "stop": stop, "logprobs": logprobs}
    for name in FIELDS:
        value = getattr(request, name)
        values[name] = _CONVERSIONS[name](value, model) if name in _CONVERSIONS else value
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
