# SPDX-License-Identifier: Apache-2.0
"""Malformed requests, made from the server's own description: each gets a 4xx that says what is wrong."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.harness import Reply, Server
from tests.server.schema import Schemas

FEW, MANY = 300, 10_000
VALID: Mapping[str, Mapping[str, Any]] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/tokenize": {"prompt": "abc"},
    "/detokenize": {"tokens": [97]},
}
SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck))

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["", "0", "true", "NaN", "\x00", "\ud83d", "é" * 300])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


class Malformed(NamedTuple):
    """A request that no server of this kind can answer."""

    method: str
    path: str
    body: bytes
    headers: Mapping[str, str] = {}


class Fuzz:
    """A server, its description, and a connection that is kept."""

    def __init__(self, server: Server) -> None:
        self.server = server
        document = server.get("/openapi.json").json
        self.schemas = Schemas(document)
        self.bodies = {
            path: self.schemas.resolve(operations["post"]["requestBody"]["content"]["application/json"]["schema"])
            for path, operations in document["paths"].items()
            if "requestBody" in operations.get("post", {})
        }
        assert set(self.bodies) == set(VALID)
        self._connection = server.connection()

    def send(self, request: Malformed) -> Reply:
        try:
            return self._send(request)
        except (http.client.RemoteDisconnected, BrokenPipeError):
            # The server may close a connection that it kept; it must take a new one.
            self._connection.close()
            return self._send(request)

    def _send(self, request: Malformed) -> Reply:
        headers = {"Content-Type": "application/json", **request.headers}
        self._connection.request(request.method, request.path, request.body, headers)
        answer = self._connection.getresponse()
        return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())

    def check(self, request: Malformed) -> None:
        reply = self.send(request)
        assert 400 <= reply.status < 500, (request, reply)
        assert reply.error["type"]


@pytest.fixture(scope="module")
def fuzz(server: Server) -> Iterator[Fuzz]:
    fuzz = Fuzz(server)
    yield fuzz
    # The server serves on, and nothing of the malformed requests is left in it.
    assert server.get("/health").status == 200
    assert server.complete("abc", max_tokens=3)["choices"][0]["text"] == "abc"
    server.wait_metric("vllm:num_requests_running", 0)
    assert server.metric("vllm:request_success_total", finished_reason="error") == 0


def encoded(body: Any) -> bytes:
    return json.dumps(body).encode()


@st.composite
def malformed(draw: st.DrawFn, fuzz: Fuzz) -> Malformed:
    """One of the ways in which a request can be wrong."""
    path = draw(st.sampled_from(sorted(VALID)))
    valid, schema = dict(VALID[path]), fuzz.bodies[path]
    way = draw(
        st.sampled_from(["value", "value", "value", "nested", "unknown", "missing", "cut", "bytes", "shape", "route"])
    )
    if way == "value":
        name = draw(st.sampled_from(sorted(schema["properties"])))
        field = schema["properties"][name]
        # Null is the same as nothing.
        value = draw(values.filter(lambda v: v is not None and not fuzz.schemas.conforms(v, field)))
        return Malformed("POST", path, encoded(valid | {name: value}))
    if way == "nested":
        name = draw(st.sampled_from(sorted(schema["properties"])))
        field = fuzz.schemas.resolve(schema["properties"][name])
        value = draw(st.lists(values, min_size=1, max_size=4).filter(lambda v: not fuzz.schemas.conforms(v, field)))
        return Malformed("POST", path, encoded(valid | {name: value}))
    if way == "unknown":
        name = draw(st.text(max_size=12).filter(lambda n: n not in schema["properties"]))
        return Malformed("POST", path, encoded(valid | {f"x_{name}": draw(values)}))
    if way == "missing":
        for name in schema.get("required") or ["prompt"]:
            del valid[name]
        return Malformed("POST", path, encoded(valid))
    if way == "cut":
        whole = encoded(valid)
        return Malformed("POST", path, whole[: draw(st.integers(0, len(whole) - 1))])
    if way == "bytes":
        return Malformed("POST", path, draw(st.binary(max_size=40).filter(lambda b: not b.strip().startswith(b"{"))))
    if way == "shape":
        return Malformed("POST", path, encoded(draw(values.filter(lambda v: not isinstance(v, dict)))))
    return draw(
        st.sampled_from(
            [
                Malformed("GET", path, b""),
                Malformed("PUT", path, encoded(valid)),
                Malformed("DELETE", path, b""),
                Malformed("POST", path + "/", encoded(valid)),
                Malformed("POST", "/v1/nothing", encoded(valid)),
                Malformed("POST", path, encoded(valid | {"model": "another"})),
                Malformed("POST", "/v1/completions", encoded(VALID["/v1/completions"]), {"X-Data-Parallel-Rank": "7"}),
                Malformed("GET", "/v1/models/nothing", b""),
            ]
        )
    )


@settings(SETTINGS, max_examples=FEW)
@given(data=st.data())
def test_malformed_requests_get_a_clear_4xx(fuzz: Fuzz, data: st.DataObject) -> None:
    fuzz.check(data.draw(malformed(fuzz)))


@pytest.mark.long
@pytest.mark.timeout(1800)
@settings(SETTINGS, max_examples=MANY)
@given(data=st.data())
def test_ten_thousand_malformed_requests(fuzz: Fuzz, data: st.DataObject) -> None:
    fuzz.check(data.draw(malformed(fuzz)))


@settings(SETTINGS, max_examples=FEW)
@given(data=st.data())
def test_no_value_of_any_field_breaks_the_server(fuzz: Fuzz, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(VALID)))
    # These two decide how long an answer takes.
    names = sorted(set(fuzz.bodies[path]["properties"]) - {"n", "max_tokens", "max_completion_tokens"})
    fields = data.draw(st.dictionaries(st.sampled_from(names), values, max_size=3))
    reply = fuzz.send(Malformed("POST", path, encoded({**VALID[path], **fields})))
    assert reply.status == 200 or 400 <= reply.status < 500, (fields, reply)
    if reply.status != 200:
        assert reply.error["type"]
