# SPDX-License-Identifier: Apache-2.0
"""The ``paceline`` command: its subcommands by name, and how errors look."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from paceline import __version__
from paceline.cli.output import CommandError
from paceline.cli.random_eagle3 import EXAMPLES as EAGLE3_EXAMPLES
from paceline.cli.random_eagle3 import random_eagle3
from paceline.cli.upcycle import EXAMPLES as UPCYCLE_EXAMPLES
from paceline.cli.upcycle import upcycle
from paceline.core.config import ConfigError

HELP = """Serve language models on ranks that decode in step, and judge a scheduler's policy in virtual time.

The same scheduler runs a real model and a simulated cluster."""

EXAMPLES = """Examples:

  paceline demo
  paceline sim list
  paceline sim run kimi_k3_dep16 --set workload.request_rate=2
  paceline sim compare kimi_k3_dep16 --sweep workload.request_rate=2,3,4,5,6 \\
      --vary speculation.pad_resumed=running,resumed --seeds 5 --out out
  paceline bench scheduler --running 64,256

Each command explains itself: paceline sim compare --help"""


app = App(name="paceline", help=HELP, help_epilogue=EXAMPLES, help_format="plaintext", version=__version__)
app.command("paceline.cli.sim:app", name="sim", help="Simulate a cluster in virtual time: run, compare, list, show.")
app.command("paceline.cli.bench:app", name="bench", help="Measure the scheduler and the simulator on this machine.")
app.command("paceline.cli.demo:demo", name="demo", help="A measured cluster beside the simulated one; a real model.")
app.command(
    "paceline.cli.serve:serve",
    name="serve",
    help="Serve a model behind the OpenAI API.",
    help_epilogue="Example:\n\n  paceline serve smollm2 --max-num-seqs 32\n  curl http://127.0.0.1:8000/v1/models",
)
app.command(random_eagle3, name="random-eagle3", help_epilogue=EAGLE3_EXAMPLES)
app.command(upcycle, name="upcycle", help_epilogue=UPCYCLE_EXAMPLES)


@app.command(help_epilogue="")
def version() -> None:
    """Print the version."""
    print(__version__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's); the exit status.

    0: done. 2: not possible as asked, and one line on stderr says why. 130: interrupted.
    """
    tokens = list(sys.argv[1:] if argv is None else argv)
    try:
        app(tokens, exit_on_error=False, print_error=False, result_action="return_none")
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (CycloptsError, ConfigError, CommandError, OSError) as error:
        print(f"paceline: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
