# SPDX-License-Identifier: Apache-2.0
"""Counters that no other file's tests drive."""

from __future__ import annotations

import pytest

from .driving import Drive, engine_config, sync_connector


@pytest.mark.parametrize("connector", [None, "decode_bench"])
def test_only_the_first_request_that_joins_an_idle_rank_is_an_idle_admission(connector: str | None) -> None:
    d = Drive(engine_config(), sync_connector(connector, {}) if connector else None)
    for name in ("first", "together"):
        d.add(name, 33, max_tokens=20)
    d.step()
    assert d.s.stats.idle_admissions == 1
    d.add("beside them", 33, max_tokens=20)
    d.step()
    assert d.s.stats.idle_admissions == 1
    d.run()
    assert set(d.ended) == {"first", "together", "beside them"}
    d.add("after them", 33, max_tokens=1)
    d.run()
    assert d.s.stats.idle_admissions == 2
