# SPDX-License-Identifier: Apache-2.0
"""What agreeing on a step costs is measured by its parts."""

from __future__ import annotations

from paceline.bench.agreement import run


def test_parts_add_up() -> None:
    result = run([1, 16], repeats=3)
    assert [row["ranks"] for row in result["rows"]] == [1, 16]
    for row in result["rows"]:
        parts = [row["dispatch_us"], row["unpack_us"], row["agree_us"]]
        assert min(parts) > 0
        assert row["total_us"] == sum(parts)
