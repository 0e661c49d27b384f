# SPDX-License-Identifier: Apache-2.0
"""The purity lint finds what it is for."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def complaints(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "lint"))
    import purity

    yield lambda source: [text for _, text in purity.eager(ast.parse(source))]
    for name in ("purity", "files"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("source", "late"),
    [
        ("import paceline.runtime", "paceline.runtime"),
        ("from paceline.runtime.llm import LLM", "paceline.runtime"),
        ("from paceline import server", "paceline.server"),
        ("if True:\n    from paceline.server.serve import serve", "paceline.server"),
        ("from paceline import LLM", "paceline.LLM"),
    ],
)
def test_cli_must_not_import_what_needs_an_extra(complaints, source: str, late: str) -> None:  # type: ignore[no-untyped-def]
    assert complaints(source) == [f"import {late} inside the function that needs it"]
    assert not complaints("def command():\n" + "".join(f"    {line}\n" for line in source.splitlines()))
    assert not complaints(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
        + "".join(f"    {line}\n" for line in source.splitlines())
    )


def test_what_the_base_install_has_may_be_imported_at_once(complaints) -> None:  # type: ignore[no-untyped-def]
    assert not complaints("from paceline.servers import x\nfrom paceline import __version__\nimport paceline.core.plan")
