# SPDX-License-Identifier: Apache-2.0
"""Where a command's output goes: tables and JSON to stdout, progress and notes to stderr."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

STDOUT = "-"
PIPE_WIDTH = 140
"""Columns for tables that go to a file or a pipe, which have no width of their own."""


def _path_or_stdout(type_: object, value: str | None) -> None:
    """Let ``-`` through, and no option that follows ``--json`` by mistake."""
    if value is not None and value.startswith("-") and value != STDOUT:
        raise ValueError(f"needs a file, or - for stdout, got {value!r}")


Json = Annotated[
    str | None,
    Parameter(
        name="--json",
        allow_leading_hyphen=True,
        validator=_path_or_stdout,
        help="Write the result as JSON to this file; - prints it, and nothing else, to stdout.",
    ),
]
"""Where a command's result goes as data."""


class CommandError(Exception):
    """A command cannot do what was asked; the message says why and what to do."""


def stdout() -> Console:
    """For tables and text."""
    return _console(stderr=False)


def stderr() -> Console:
    """For progress and notes, so that stdout stays parseable."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, highlight=False, width=None if terminal else PIPE_WIDTH)


def write_json(data: dict[str, Any], target: str) -> None:
    """Write ``data`` to the file ``target``, or to stdout if it is ``-``."""
    text = json.dumps(data, indent=1)
    if target == STDOUT:
        print(text)
    else:
        Path(target).write_text(text + "\n", encoding="utf-8")


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while the block runs; call what it gives with (done, total). Silent without a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = stderr()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
