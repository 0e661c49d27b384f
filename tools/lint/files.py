# SPDX-License-Identifier: Apache-2.0
"""The source files that the lints of this folder read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("src", "tests", "tools")


def sources(*suffixes: str) -> Iterator[Path]:
    """Files under `FOLDERS` with one of ``suffixes``, in a stable order."""
    for folder in FOLDERS:
        yield from sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)


def report(name: str, problems: list[str], checked: int) -> int:
    """Print ``problems``, or that there are none among ``checked`` files; the exit status."""
    for problem in problems:
        print(problem)
    print(f"{name}: {len(problems) or 'no'} problem{'' if len(problems) == 1 else 's'} in {checked} files")
    return 1 if problems else 0
