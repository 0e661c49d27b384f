# SPDX-License-Identifier: Apache-2.0
"""Servers that tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.harness import Server, fake_server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A fast one: one token per step."""
    with fake_server() as server:
        yield server


@pytest.fixture(scope="session")
def drafting() -> Iterator[Server]:
    """One that gains four tokens per step."""
    with fake_server({"num_drafts": 3}) as server:
        yield server
