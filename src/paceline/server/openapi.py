# SPDX-License-Identifier: Apache-2.0
"""The server's description of itself, derived from the types that it reads and writes."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import msgspec

from paceline import __version__
from paceline.server import replies, requests
from paceline.server.errors import ErrorBody

_STREAM = {"text/event-stream": {"schema": {"type": "string"}}}

OPERATIONS: tuple[tuple[str, str, str, type[msgspec.Struct] | None, type[msgspec.Struct] | None], ...] = (
    ("post", "/v1/completions", "Complete prompts", requests.CompletionRequest, replies.CompletionReply),
    ("post", "/v1/chat/completions", "Answer a conversation", requests.ChatRequest, replies.ChatReply),
    ("get", "/v1/models", "What is served", None, replies.ModelList),
    ("get", "/v1/models/{name}", "One of the served models", None, replies.ModelCard),
    ("post", "/tokenize", "Text or conversation to token ids", requests.TokenizeRequest, replies.TokenizeReply),
    ("post", "/detokenize", "Token ids to text", requests.DetokenizeRequest, replies.DetokenizeReply),
    ("get", "/version", "The server's version", None, replies.VersionReply),
    ("get", "/health", "200 while new requests are welcome, 503 when not", None, None),
    ("get", "/ping", "As /health", None, None),
    ("get", "/metrics", "Metrics for Prometheus", None, None),
)
"""Method, path, what it does, the body it takes and the one it gives (None: none, or not JSON)."""


@cache
def document() -> bytes:
    """The OpenAPI 3.1 document, as JSON."""
    bodies = [kind for *_, taken, given in OPERATIONS for kind in (taken, given) if kind is not None]
    kinds = list(dict.fromkeys([*bodies, replies.ChatChunk, ErrorBody]))
    refs, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(kinds, refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, path, summary, taken, given in OPERATIONS:
        paths.setdefault(path, {})[method] = _operation(path, summary, schema_of, taken, given)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "paceline", "version": __version__},
            "paths": paths,
            "components": {"schemas": components},
        }
    )


def _operation(path: str, summary: str, schema_of: dict[Any, Any], taken: Any, given: Any) -> dict[str, Any]:
    content = {"application/json": {"schema": schema_of[given]}} if given else {}
    if path.endswith("completions"):
        content |= _STREAM
    error = {"description": "what is wrong", "content": {"application/json": {"schema": schema_of[ErrorBody]}}}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "done", "content": content}, "4XX": error, "5XX": error},
    }
    if taken is not None:
        body = {"application/json": {"schema": schema_of[taken]}}
        operation["requestBody"] = {"required": True, "content": body}
    names = re.findall(r"\{(\w+)\}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return operation
