# SPDX-License-Identifier: Apache-2.0
"""Kernels in Numba's cache: what they compute does not depend on what else a process has compiled or loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_KERNELS = """
import os
import numpy as np
from paceline.models.codegen import kernel

VALUE = int(os.environ["VALUE"])  # Part of the code that is compiled.

@kernel(fastmath=True)
def inner(x):
    total = 0.0
    for i in range(x.shape[0]):
        for j in range(x.shape[0]):
            total += np.sqrt(x[i] * x[j])
        for j in range(i):
            total += x[i] / x[j]
        for j in range(i, x.shape[0]):
            x[j] = x[i] * 2 - 1
    return 0.0 * total + VALUE

@kernel()
def outer(x):
    return inner(x)

print(inner(np.ones(3)), outer(np.ones(3)))
"""


def _run(folder: Path, value: int) -> list[float]:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder / "cache"), "VALUE": str(value)}
    command = [sys.executable, folder / "two_kernels.py"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return [float(word) for word in done.stdout.split()]


def test_a_kernel_from_the_cache_calls_what_it_was_compiled_with(tmp_path: Path) -> None:
    """Also where another compilation of the kernel that it calls, of the same name, was loaded first."""
    (tmp_path / "two_kernels.py").write_text(_KERNELS)
    assert _run(tmp_path, 1) == [1, 1]
    for path in (tmp_path / "cache").glob("*/two_kernels.inner*"):
        path.unlink()
    assert _run(tmp_path, 2) == [2, 1]
