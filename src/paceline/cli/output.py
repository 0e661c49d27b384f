# SPDX-License-Identifier: Apache-2.0
"""Where a command's output goes: tables and JSON to stdout, progress and notes to stderr."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, Token
from rich.console import Console

from paceline.sim.fields import json_text

STDOUT = "-"
_INTEGER = re.compile(r"[+-]?[0-9]+")
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


def integer(type_: object, tokens: Sequence[Token]) -> int:
    """A converter of `Parameter` that refuses 1.5 where an integer is needed, instead of rounding it."""
    text = tokens[0].value
    if not _INTEGER.fullmatch(text):
        raise ValueError(f"must be an integer, got {text!r}")
    return int(text)


def integer_or_auto(type_: object, tokens: Sequence[Token]) -> int | str:
    """The like for an integer or the word auto."""
    text = tokens[0].value
    if text != "auto" and not _INTEGER.fullmatch(text):
        raise ValueError(f"must be an integer or auto, got {text!r}")
    return text if text == "auto" else int(text)


def at_least(value: int, least: int, option: str) -> int:
    """``value``. Raises `CommandError` naming ``option`` if it is below ``least``."""
    if value < least:
        raise CommandError(f"{option}: must be at least {least}, got {value}")
    return value


def json_object(text: str | None, option: str) -> dict[str, Any] | None:
    """The object in ``text``, None if there is no text. Raises `CommandError` naming ``option`` if it is none."""
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CommandError(f"{option}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CommandError(f"{option}: must be a JSON object, got {text}")
    return value


def check_target(target: str | None, option: str) -> None:
    """Raise `CommandError` naming ``option`` unless ``target`` can be written: a file, - or None (nothing to write)."""
    if target is not None and target != STDOUT:
        _check_writable(Path(target), option)


def check_folder(folder: Path | None, names: Sequence[str], option: str) -> None:
    """Make ``folder``. Raises `CommandError` naming ``option`` unless the files ``names`` in it can be written."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"{option}: cannot make the folder {str(folder)!r}: {error.strerror}") from None
    for name in names:
        _check_writable(folder / name, option)


def _check_writable(path: Path, option: str) -> None:
    """Open ``path`` for writing and leave it as it was: contents as they are, or absent."""
    try:
        existed = path.exists()
        if existed and not (path.is_file() or path.is_dir()):  # closing a pipe would end what its reader sees
            writable = os.access(path, os.W_OK)
            if not writable:
                raise PermissionError(None, "Permission denied")
            return
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise CommandError(f"{option}: cannot write {str(path)!r}: {error.strerror}") from None


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
    """Write ``data`` to the file ``target``, or to stdout if it is ``-``; NaN and infinities become null."""
    text = json_text(data)
    if target == STDOUT:
        print(text)
    else:
        Path(target).write_text(text + "\n", encoding="utf-8")


@contextlib.contextmanager
def progress_bar(what: str, *, shown: bool = True, refreshes_per_s: float = 10) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while the block runs; call what it gives with (done, total). Silent without a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = stderr()
    disable = not (shown and console.is_terminal)
    with Progress(
        *columns, console=console, transient=True, disable=disable, refresh_per_second=refreshes_per_s
    ) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
