# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for packages that only the CPU's compiled kernels use, so that a GPU machine need not have them.

Importing paceline's executor imports those kernels. Where their compiler is missing they are things that nothing on
a GPU calls.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGES = ("numba", "llvmlite")


class _Anything:
    """Whatever it is asked for; a function that it decorates is no longer there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __or__(self, other: Any) -> Any:
        return self


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in PACKAGES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


def stand_in() -> list[str]:
    """Have the packages that are missing stood in for; their names."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if "numba" in missing:
        sys.meta_path.append(_Finder())
    return missing
