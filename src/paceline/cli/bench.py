# SPDX-License-Identifier: Apache-2.0
"""``paceline bench``: a server under load, ranks in step, what deciding costs, and how fast the simulator is."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import App, Parameter
from rich import box
from rich.table import Table

from paceline.cli.output import STDOUT, CommandError, Json, at_least, check_target, integer, stdout, write_json

EXAMPLES = """Examples:

  paceline bench serve --base-url http://127.0.0.1:8000 --random-input-len 128 \\
      --random-output-len 64 --max-concurrency 8 --num-prompts 32
  paceline bench serve --request-rate 2 --num-prompts 100 --goodput ttft:500 tpot:50 \\
      --save-result --save-detailed
  paceline bench scheduler
  paceline bench scheduler --running 1,12,64,256,1024 --num-speculative-tokens 3 --json -
  paceline bench graphs --sizes 4,8,16
  paceline bench sim"""
GRAPHS = """Decode steps of a mixture in int8 by the static backend (FULL), and the same by the general path.

Milliseconds from the plan to hidden states, without logits, sampling and drafts, on a rank's share of the cores.
Exchange excluded: one rank with its share of the experts, to which as many tokens come as all ranks would bring.
Exchange included: all ranks, each a process. Takes a minute or two."""

app = App(name="bench", help_epilogue=EXAMPLES)
app.command("paceline.cli.bench_serve:serve", name="serve", help="Send load to a server and measure it.")
app.command("paceline.cli.bench_line:line", name="line", help="Ranks in lock-step, before and after the padding rule.")
app.command("paceline.cli.bench_graphs:graphs", name="graphs", help=GRAPHS)


@app.command
def scheduler(
    *,
    running: Annotated[str, Parameter(help="Running requests, one measurement each.")] = "1,12,64,256,1024",
    num_speculative_tokens: Annotated[
        int, Parameter(converter=integer, help="Drafts a request carries into each step.")
    ] = 3,
    steps: Annotated[int, Parameter(converter=integer, help="Timed steps; the median counts.")] = 150,
    json: Json = None,
) -> None:
    """Time one rank's step without a model: plan, validate, commit, next drafts, outputs; microseconds per row."""
    from paceline.bench.scheduler import run

    counts = parse_counts(running, "--running")
    at_least(num_speculative_tokens, 0, "--num-speculative-tokens")
    at_least(steps, 1, "--steps")
    check_target(json, "--json")
    emit(run(counts, num_speculative_tokens, steps), json)


@app.command
def agreement(
    *,
    ranks: Annotated[str, Parameter(help="Ranks of a group, one measurement each.")] = "2,4,16,64",
    repeats: Annotated[int, Parameter(converter=integer, help="Timed batches of steps; the median counts.")] = 100,
    json: Json = None,
) -> None:
    """Time what ranks in lock-step do to agree on a step, without the collective that carries their votes."""
    from paceline.bench.agreement import run

    counts = parse_counts(ranks, "--ranks")
    at_least(repeats, 1, "--repeats")
    check_target(json, "--json")
    emit(run(counts, repeats), json)


@app.command
def sim(
    *,
    scenario: Annotated[str, Parameter(help="A shipped scenario or a YAML file.")] = "kimi_k3_dep16",
    json: Json = None,
) -> None:
    """Time the simulator on one core: busy rank-steps (a rank with at least one row) per second.

    The scenario is run at 2, 4 and 6 requests per second, whatever its own rate; the best of three counts.
    """
    from paceline.bench.sim import run
    from paceline.sim.cluster import SimulationStuck

    check_target(json, "--json")
    try:
        emit(run(scenario), json)
    except SimulationStuck as error:
        raise CommandError(str(error)) from error


def parse_counts(text: str, option: str) -> list[int]:
    """Positive integers separated by commas."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise CommandError(f"{option}: must be integers separated by commas, got {text!r}") from None
    for count in counts:
        at_least(count, 1, option)
    return counts


def emit(result: dict[str, Any], target: str | None) -> None:
    """JSON where asked for, and a table unless stdout is taken."""
    if target is not None:
        write_json(result, target)
    if target == STDOUT:
        return
    rows = result["rows"]
    table = Table(box=box.SIMPLE_HEAD)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{v:,.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    stdout().print(table)
