# SPDX-License-Identifier: Apache-2.0
"""Which ranks a server runs, by its flags and its environment."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.cli.data_parallel import DEFAULT_TIMEOUT_S, DataParallelFlags
from paceline.cli.output import CommandError

MEETING: dict[str, Any] = {"address": "10.0.0.1", "rpc_port": 29550}
EXPERTS: dict[str, Any] = {"enable_expert_parallel": True}


@pytest.mark.parametrize(
    ("given", "environment", "local", "options"),
    [
        ({}, {}, 1, {"size": 1, "first": 0}),
        ({"size": 4}, {}, 4, {"size": 4, "first": 0}),
        ({"size": 4, "backend": "ray"}, {}, 4, {"size": 4, "first": 0}),
        ({"size": 4, "size_local": 4, "start_rank": 0}, {}, 4, {"size": 4, "first": 0}),
        ({"size": 4, "size_local": 2, "start_rank": 2, "hybrid_lb": True}, {}, 2, {"size": 4, "first": 2}),
        ({"size": 4, "rank": 3}, {}, 1, {"size": 4, "first": 3}),
        (
            {"size": 4, "rank": 3, **MEETING, **EXPERTS},
            {},
            1,
            {"size": 4, "first": 3, "store": "10.0.0.1:29550"},
        ),
        (
            {"size": 4, "size_local": 2, "hybrid_lb": True, "address": "fd00::1", "rpc_port": 29550, **EXPERTS},
            {},
            2,
            {"size": 4, "first": 0, "store": "[fd00::1]:29550"},
        ),
        (
            EXPERTS,
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.2", "MASTER_PORT": "29600"},
            1,
            {"size": 2, "first": 1, "store": "10.0.0.2:29600"},
        ),
        ({}, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, 1, {"size": 2, "first": 1}),
        (
            {"size": 4, "size_local": 3, **MEETING},
            {},
            3,
            {"size": 4, "first": 0, "front": "10.0.0.1:29551"},
        ),
        (
            {"size": 4, "headless": True, "start_rank": 3, **MEETING, **EXPERTS},
            {},
            1,
            {"size": 4, "first": 3, "store": "10.0.0.1:29550", "front": "10.0.0.1:29551"},
        ),
        (
            {"size": 4, "headless": True, "size_local": 2, **MEETING},
            {},
            2,
            {"size": 4, "first": None, "front": "10.0.0.1:29551"},
        ),
        ({"size": 2}, {"RANK": "1", "WORLD_SIZE": "2"}, 2, {"size": 2, "first": 0}),
        ({}, {"RANK": "0", "WORLD_SIZE": "1"}, 1, {"size": 1, "first": 0}),
        ({}, {"RANK": "3"}, 1, {"size": 1, "first": 0}),
    ],
)
def test_ranks_of_a_server(
    given: dict[str, Any], environment: dict[str, str], local: int, options: dict[str, Any]
) -> None:
    ranks, place = DataParallelFlags(**given).with_environment(environment).placement()
    assert ranks == local
    expected = {"enable_expert_parallel": "enable_expert_parallel" in given, "timeout_s": DEFAULT_TIMEOUT_S, **options}
    assert place == expected


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"size": 0}, "--data-parallel-size:"),
        ({"size": 2, "size_local": 3}, "--data-parallel-size-local:"),
        ({"size": 2, "size_local": 0}, "--data-parallel-size-local:"),
        ({"size": 2, "size_local": 1}, "--data-parallel-address"),
        ({"size": 2, "size_local": 1, "start_rank": 1, **MEETING}, "--headless"),
        ({"size": 2, "hybrid_lb": True}, "--data-parallel-hybrid-lb:"),
        ({"size": 2, "rank": 1, "hybrid_lb": True}, "--data-parallel-hybrid-lb:"),
        ({"size": 2, "rank": 2}, "--data-parallel-rank:"),
        ({"size": 2, "rank": -1}, "--data-parallel-rank:"),
        ({"size": 2, "rank": 1, "size_local": 1}, "--data-parallel-size-local:"),
        ({"size": 2, "start_rank": 1}, "--data-parallel-start-rank:"),
        ({"size": 4, "size_local": 2, "start_rank": 3, "hybrid_lb": True}, "--data-parallel-start-rank:"),
        ({"size": 2, "backend": "threads"}, "--data-parallel-backend:"),
        ({"backend": "ray"}, "--data-parallel-backend:"),
        ({"size": 2, "backend": "ray", "rank": 1}, "--data-parallel-rank:"),
        ({"size": 2, "backend": "ray", "headless": True}, "--headless:"),
        ({"size": 2, "headless": True, **MEETING}, "--data-parallel-size-local:"),
        ({"size": 2, "headless": True, "size_local": 2, **MEETING}, "--data-parallel-size-local:"),
        ({"size": 2, "headless": True, "size_local": 0, **MEETING}, "--data-parallel-size-local:"),
        ({"size": 2, "headless": True, "size_local": 1}, "--data-parallel-address"),
        ({"size": 2, "headless": True, "start_rank": 0, **MEETING}, "--data-parallel-start-rank:"),
        ({"size": 2, "headless": True, "start_rank": 2, **MEETING}, "--data-parallel-start-rank:"),
        ({"size": 3, "headless": True, "start_rank": 2, "size_local": 2, **MEETING}, "--data-parallel-size-local:"),
        ({"size": 2, "headless": True, "start_rank": 1}, "--data-parallel-address"),
        ({"size": 2, "headless": True, "rank": 1, **MEETING}, "--headless:"),
        ({"size": 2, "headless": True, "start_rank": 1, "hybrid_lb": True, **MEETING}, "--data-parallel-hybrid-lb:"),
        ({"size": 2, "address": "10.0.0.1"}, "--data-parallel-address:"),
        ({"size": 2, "rpc_port": 1}, "--data-parallel-rpc-port:"),
        ({"size": 2, "rank": 1, **EXPERTS}, "--data-parallel-address"),
        ({"size": 2, "rank": 1, **EXPERTS, "address": "a", "rpc_port": 65535}, "--data-parallel-rpc-port:"),
        ({"timeout_s": 5.0, **EXPERTS}, "--distributed-timeout-seconds:"),
        ({"size": 2, "timeout_s": 5.0}, "--distributed-timeout-seconds:"),
        ({"size": 2, "timeout_s": 0.0, **EXPERTS}, "--distributed-timeout-seconds:"),
    ],
)
def test_contradictions_are_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(CommandError, match=named):
        DataParallelFlags(**given).placement()


def test_variables_that_are_no_numbers_are_named() -> None:
    with pytest.raises(CommandError, match="RANK: must be a number, got 'first'"):
        DataParallelFlags().with_environment({"RANK": "first", "WORLD_SIZE": "2"})
