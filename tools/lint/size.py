# SPDX-License-Identifier: Apache-2.0
"""Lint: a file has at most 400 lines, a function at most 80 with its docstring.

A case that reads better whole says so: ``# size: <reason>`` in the first ten lines of a file, or on the line of a
function's ``def``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from files import ROOT, report, sources

FILE_LINES = 400
FUNCTION_LINES = 80
EXCUSE = re.compile(r"# size: \S")


def too_long(path: Path) -> Iterator[str]:
    """Complaints about one file and its functions."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    where = path.relative_to(ROOT)
    if len(lines) > FILE_LINES and not any(EXCUSE.search(line) for line in lines[:10]):
        yield f"{where}:1: {len(lines)} lines, at most {FILE_LINES}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES and not EXCUSE.search(lines[node.lineno - 1]):
                yield f"{where}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES}"


def main() -> int:
    paths = list(sources(".py"))
    return report("sizes", [problem for path in paths for problem in too_long(path)], len(paths))


if __name__ == "__main__":
    sys.exit(main())
