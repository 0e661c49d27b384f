# SPDX-License-Identifier: Apache-2.0
"""The last part of ``paceline demo``: two ranks in step, before and after, on this machine."""

from __future__ import annotations

import subprocess
import sys
import tempfile

from paceline.bench.served import PACELINE, exit_on_sigterm
from paceline.cli.output import CommandError, stdout

BENCH = ("--request-rates", "2", "--num-prompts", "100")


def show_line() -> None:
    """Run the experiment of part 1 on real ranks, briefly.

    Raises:
        CommandError: it failed.
    """
    console = stdout()
    console.print(
        "\n[bold]4. A line of two ranks on this machine[/bold]\n"
        "The model's MLPs become mixtures of four experts, two on each rank. Steps in which a rank brings a one-token\n"
        "row run eagerly on both: before (running) and after (resumed), with what the laboratory expects in brackets.\n"
    )
    console.print(f"$ paceline bench line {' '.join(BENCH)}")
    sys.stdout.flush()
    with exit_on_sigterm(), tempfile.TemporaryDirectory(prefix="paceline-demo-") as folder:
        done = subprocess.run([*PACELINE, "bench", "line", *BENCH, "--work-dir", folder], check=False)
    if done.returncode:
        raise CommandError(f"the line ended with status {done.returncode}")
