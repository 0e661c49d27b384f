# SPDX-License-Identifier: Apache-2.0
"""Lint: what core must not touch, and where cli may import runtime and server.

The same decisions must come out of the core in serving and in simulation, and twice from one seed. So it reads no
clock, opens no socket, imports no torch, and draws only from generators that were given a seed. The command line must
start on the base install, so it imports runtime and server inside functions only.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from files import ROOT, report, sources

PACKAGE = ROOT / "src" / "paceline"
FORBIDDEN_IN_CORE = frozenset(
    {"asyncio", "datetime", "multiprocessing", "os", "secrets", "select", "selectors", "socket", "subprocess"}
    | {"threading", "time", "torch", "uuid"}
)
SEEDED = frozenset({"Random", "RandomState", "default_rng", "SeedSequence", "PCG64", "Philox"})
GENERATORS = SEEDED | {"Generator"}
"""What core may take from `random` and `numpy.random`: objects, never the functions with hidden global state."""
LATE_IN_CLI = ("paceline.runtime", "paceline.server", "paceline.LLM")
"""What cli imports inside functions: they need extras that the base install lacks."""


def imported(node: ast.AST) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of each name that an import statement takes; none for other nodes."""
    if isinstance(node, ast.Import):
        return [(node.lineno, alias.name) for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return []


def impure(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, complaint) for a module of core."""
    for node in ast.walk(tree):
        for line, name in imported(node):
            top, _, rest = name.partition(".")
            if top in FORBIDDEN_IN_CORE:
                yield line, f"core must not import {top}"
            if top == "random" and rest and rest not in GENERATORS:
                yield line, f"{name} draws from a hidden state; use random.Random(seed)"
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if owner in ("random", "np.random", "numpy.random") and node.attr not in GENERATORS:
                yield node.lineno, f"{owner}.{node.attr} draws from a hidden state; use a generator with a seed"
        if isinstance(node, ast.Call) and not node.args and not node.keywords:
            called = ast.unparse(node.func).split(".")[-1]
            if called in SEEDED:
                yield node.lineno, f"{called}() without a seed differs from run to run; pass one"


def eager(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, complaint) for a module of cli: one of `LATE_IN_CLI` imported when the module itself is."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            pending.extend(node.orelse)
            continue
        for line, name in imported(node):
            for package in LATE_IN_CLI:
                if f"{name}.".startswith(f"{package}."):
                    yield line, f"import {package} inside the function that needs it"
        pending.extend(ast.iter_child_nodes(node))


def main() -> int:
    checks: tuple[tuple[Path, Callable[[ast.Module], Iterator[tuple[int, str]]]], ...] = (
        (PACKAGE / "core", impure),
        (PACKAGE / "cli", eager),
    )
    problems, checked = [], 0
    for folder, check in checks:
        for path in (path for path in sources(".py") if path.is_relative_to(folder)):
            checked += 1
            tree = ast.parse(path.read_text(encoding="utf-8"))
            problems += [f"{path.relative_to(ROOT)}:{line}: {text}" for line, text in check(tree)]
    return report("purity", problems, checked)


if __name__ == "__main__":
    sys.exit(main())
