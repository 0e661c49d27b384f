# SPDX-License-Identifier: Apache-2.0
"""Errors as OpenAI clients read them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.responses import Response

RETRY_SOON_S = 1
"""Retry-After where a place in the queue may be free at once."""
RETRY_LATER_S = 10
"""Retry-After where another server has to take over first."""

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ErrorInfo(msgspec.Struct, frozen=True):
    """What went wrong; ``param``: the field of the request that is to blame, ``code``: the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success."""

    error: ErrorInfo


class ApiError(Exception):
    """A request that gets no answer but an error."""

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        self.body = ErrorBody(ErrorInfo(message, _TYPES.get(status) or HTTPStatus(status).phrase, param, status))

    def response(self) -> Response:
        """The error as an HTTP answer."""
        return Response(msgspec.json.encode(self.body), self.status, self.headers, "application/json")


def bad_request(param: str | None, problem: str) -> ApiError:
    """400: ``param`` is at fault; the message begins with its name."""
    return ApiError(400, f"{param}: {problem}" if param else problem, param)


def unavailable(message: str, retry_after_s: int) -> ApiError:
    """503, with the time after which it is worth trying again."""
    return ApiError(503, message, headers={"Retry-After": str(retry_after_s)})
