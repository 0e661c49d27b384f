# SPDX-License-Identifier: Apache-2.0
"""Which KV connector an engine has, from vLLM's ``kv_transfer_config``; torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from paceline.connectors.outside import WHERE, ConnectorFactory, Role, outside_connector
from paceline.core.config import LoadFailurePolicy, require, require_choice

NAMES = ("DecodeBenchConnector",)
"""Connectors that there are here, by vLLM's names."""

_KEYS = (
    "kv_connector",
    "kv_connector_module_path",
    "kv_role",
    "kv_load_failure_policy",
    "kv_buffer_device",
    "kv_connector_extra_config",
)
_FILL_KEYS = ("fill_mean", "fill_std")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class FillConfig:
    """What DecodeBench writes into the blocks that it "loads": ``mean``, or noise around it if ``std`` > 0."""

    mean: float = 0.015
    std: float = 0.0

    def __post_init__(self) -> None:
        where = f"{WHERE}.kv_connector_extra_config"
        require(_is_number(self.mean), f"{where}.fill_mean", f"must be a finite number, got {self.mean!r}")
        good = _is_number(self.std) and self.std >= 0
        require(good, f"{where}.fill_std", f"must be a finite number of at least 0, got {self.std!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """A connector, what happens when a load fails, and the connector's own settings.

    ``outside``: the class of a connector from another module, which reads ``extra_config`` itself; else ``fill`` has
    what it says.
    """

    kv_connector: str
    kv_role: Role = "kv_both"
    kv_load_failure_policy: LoadFailurePolicy = "fail"
    outside: ConnectorFactory | None = None
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    fill: FillConfig = FillConfig()


def kv_transfer_config(given: Mapping[str, Any] | None) -> KVTransferConfig | None:
    """Read ``kv_transfer_config`` with vLLM's keys; None: no connector.

    Imports the module named by ``kv_connector_module_path``, if there is one.

    Raises:
        ConfigError: an unknown key, connector or value; the error names it.
    """
    if given is None:
        return None
    for key in given:
        require(key in _KEYS, f"{WHERE}.{key}", f"unknown key; known are {', '.join(_KEYS)}")
    policy = given.get("kv_load_failure_policy", "fail")
    require_choice(policy, ("fail", "recompute"), f"{WHERE}.kv_load_failure_policy")
    require_choice(given.get("kv_buffer_device", "cpu"), ("cpu",), f"{WHERE}.kv_buffer_device")
    extra = given.get("kv_connector_extra_config") or {}
    require(isinstance(extra, Mapping), f"{WHERE}.kv_connector_extra_config", f"must be an object, got {extra!r}")
    name, path, role = given.get("kv_connector"), given.get("kv_connector_module_path"), given.get("kv_role", "kv_both")
    if path is not None:
        require_choice(role, get_args(Role), f"{WHERE}.kv_role")
        outside = outside_connector(path, name)
        return KVTransferConfig(
            kv_connector=str(name), kv_role=role, kv_load_failure_policy=policy, outside=outside, extra_config=extra
        )
    known = f"must be one of {', '.join(NAMES)}, or a class of kv_connector_module_path; got {name!r}"
    require(name in NAMES, f"{WHERE}.kv_connector", known)
    # DecodeBench stands in for the prefill side, so it has no role but to be read from.
    require_choice(role, ("kv_both", "kv_consumer"), f"{WHERE}.kv_role")
    for key in extra:
        known = f"unknown key; known are {', '.join(_FILL_KEYS)}"
        require(key in _FILL_KEYS, f"{WHERE}.kv_connector_extra_config.{key}", known)
    fill = FillConfig(**{key.removeprefix("fill_"): value for key, value in extra.items()})
    return KVTransferConfig(kv_connector=str(name), kv_role=role, kv_load_failure_policy=policy, fill=fill)
