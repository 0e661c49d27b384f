# SPDX-License-Identifier: Apache-2.0
"""Lint: each source file begins with its licence line (in a script, right after the interpreter's line)."""

from __future__ import annotations

import sys

from files import ROOT, report, sources

LINE = "# SPDX-License-Identifier: Apache-2.0"
OUTSIDE_FOLDERS = ("Makefile", "pyproject.toml", ".ci/run")


def main() -> int:
    paths = [*sources(".py", ".pyi", ".sh", ".yaml", ".yml", ".toml"), *(ROOT / name for name in OUTSIDE_FOLDERS)]
    problems = []
    for path in paths:
        head = path.read_text(encoding="utf-8").splitlines()[:2]
        if head and head[0].startswith("#!"):
            head = head[1:]
        if head[:1] != [LINE]:
            problems.append(f"{path.relative_to(ROOT)}:1: first line must be: {LINE}")
    return report("licence lines", problems, len(paths))


if __name__ == "__main__":
    sys.exit(main())
