# SPDX-License-Identifier: Apache-2.0
"""The ASGI application."""

from __future__ import annotations

import logging
import secrets
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.server import openapi, routes
from paceline.server.errors import ApiError
from paceline.server.state import ServerState

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/version", "/openapi.json"})
"""What answers without a key."""

logger = logging.getLogger("paceline.server")


class RequireKey:
    """Lets requests in that carry one of the server's keys."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._known(Request(scope)):
            error = ApiError(
                401, "a valid key is needed: Authorization: Bearer KEY", headers={"WWW-Authenticate": "Bearer"}
            )
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _known(self, request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        # Every key is compared: the time taken must not tell which one was near.
        matches = [secrets.compare_digest(given.encode(), key) for key in self._keys]
        return any(matches)


async def _openapi(request: Request) -> Response:
    return Response(openapi.document(), media_type="application/json")


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        detail = f"there is no {request.url.path} here"
    elif error.status_code == 405:
        detail = f"{request.url.path} does not take {request.method}"
    else:
        detail = error.detail
    return ApiError(error.status_code, detail, headers=error.headers).response()


async def _crash(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return ApiError(500, "the server failed on this request; its log says why").response()


def build_app(state: ServerState) -> ASGIApp:
    """The application that serves ``state``."""
    endpoints: list[tuple[str, Any, list[str]]] = [
        ("/v1/completions", routes.completions, ["POST"]),
        ("/v1/chat/completions", routes.chat, ["POST"]),
        ("/v1/models", routes.models, ["GET"]),
        ("/v1/models/{name:path}", routes.model, ["GET"]),
        ("/tokenize", routes.tokenize, ["POST"]),
        ("/detokenize", routes.detokenize, ["POST"]),
        ("/health", routes.health, ["GET"]),
        ("/ping", routes.health, ["GET", "POST"]),
        ("/metrics", routes.metrics, ["GET"]),
        ("/version", routes.version, ["GET"]),
        ("/openapi.json", _openapi, ["GET"]),
    ]
    app = Starlette(
        routes=[Route(path, endpoint, methods=methods) for path, endpoint, methods in endpoints],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _crash},
    )
    # A client that misspells a path is told so, not sent elsewhere.
    app.router.redirect_slashes = False
    app.state.server = state
    return RequireKey(app, state.api_keys) if state.api_keys else app
