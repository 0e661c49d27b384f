# SPDX-License-Identifier: Apache-2.0
"""Interfaces by their addresses."""

from __future__ import annotations

import pytest

from paceline.parallel.interface import interface_of


@pytest.mark.parametrize(
    ("endpoint", "name"),
    [
        ("tcp://127.0.0.1:5555", "lo"),
        ("tcp://[::ffff:127.0.0.1]:5555", "lo"),
        ("tcp://192.0.2.7:5555", None),
        ("tcp://[2001:db8::7]:5555", None),
        ("ipc:///tmp/paceline/inbox-0", None),
    ],
)
def test_addresses_here_and_elsewhere(endpoint: str, name: str | None) -> None:
    assert interface_of(endpoint) == name
