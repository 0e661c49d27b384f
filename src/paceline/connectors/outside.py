# SPDX-License-Identifier: Apache-2.0
"""Connectors from outside this package: what their module has to offer, and how it is found; torch-free."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from paceline.core.config import ConfigError, EngineConfig, require
from paceline.core.connector import SchedulerConnector, WorkerConnector

Role = Literal["kv_producer", "kv_consumer", "kv_both"]
WHERE = "kv_transfer_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorContext:
    """What the two halves of a connector are made from.

    ``engine``: block size, cache groups and limits of the rank. ``extra_config``: ``kv_connector_extra_config`` as it
    was given. ``rank``: the data-parallel rank, 0 if alone. ``seed``: of random numbers; another on each rank.
    """

    engine: EngineConfig
    extra_config: Mapping[str, Any]
    role: Role = "kv_both"
    rank: int = 0
    seed: int = 0


class ConnectorFactory(Protocol):
    """What a class named by ``kv_connector`` offers, as class methods or static methods.

    Both are called once in the process of the engine, ``scheduler_half`` first. A setting that cannot be honoured is a
    `ValueError` that names it. What needs torch is imported inside ``worker_half``.
    """

    def scheduler_half(self, context: ConnectorContext) -> SchedulerConnector:
        """The half beside the scheduler."""
        ...

    def worker_half(self, context: ConnectorContext) -> WorkerConnector:
        """The half beside the KV cache."""
        ...


def outside_connector(path: object, name: object) -> ConnectorFactory:
    """The class ``name`` of the module ``path``.

    Raises:
        ConfigError: no such module, no such class, or it is no `ConnectorFactory`; the error names the key at fault.
    """
    module_key, name_key = f"{WHERE}.kv_connector_module_path", f"{WHERE}.kv_connector"
    if not isinstance(path, str) or not all(map(str.isidentifier, path.split("."))):
        raise ConfigError(module_key, f"must be the dotted name of a module, got {path!r}")
    if not isinstance(name, str) or not name:
        raise ConfigError(name_key, f"must name a class of {path}, got {name!r}")
    try:
        module = importlib.import_module(path)
    except Exception as error:
        raise ConfigError(module_key, f"cannot import {path}: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    require(isinstance(found, type), name_key, f"{path} has no class {name}")
    require_methods(found, ConnectorFactory, f"{path}.{name}")
    return cast(ConnectorFactory, found)


def require_methods(offered: object, protocol: type, what: str) -> None:
    """Raise `ConfigError` for ``kv_connector`` unless ``offered``, called ``what``, has all methods of ``protocol``."""
    wanted = [name for name, value in vars(protocol).items() if callable(value) and not name.startswith("_")]
    lacking = [name for name in wanted if not callable(getattr(offered, name, None))]
    require(not lacking, f"{WHERE}.kv_connector", f"{what} lacks {', '.join(lacking)} (see docs/connectors.md)")
