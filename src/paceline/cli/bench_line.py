# SPDX-License-Identifier: Apache-2.0
"""``paceline bench line``: real ranks in lock-step before and after the padding rule, the laboratory beside them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from cyclopts import Parameter
from rich import box
from rich.table import Table

from paceline.cli.output import STDOUT, CommandError, Json, check_target, integer, stderr, stdout, write_json

if TYPE_CHECKING:
    from paceline.bench.line import LineResult, Measured
    from paceline.bench.line_lab import Expected, Simulated

BAR_COLUMNS = 44
"""Of the longest bar of the chart."""


def line(
    *,
    model: Annotated[
        Path | None, Parameter(help="A folder with a mixture of experts; by default smollm2, upcycled to 4 experts.")
    ] = None,
    draft: Annotated[
        Path | None, Parameter(help="A folder with an EAGLE-3 model for it; by default a random one is made.")
    ] = None,
    work_dir: Annotated[
        Path | None, Parameter(help="Where models that are made are kept; by default in the user's cache folder.")
    ] = None,
    ranks: Annotated[int, Parameter(converter=integer, help="Data-parallel ranks.")] = 2,
    quantization: Annotated[
        Literal["int8", "none"], Parameter(help="Of the products' weights; none: in the dtype they are stored in.")
    ] = "int8",
    max_num_seqs: Annotated[int, Parameter(converter=integer, help="Requests that run on a rank at once.")] = 8,
    request_rates: Annotated[str, Parameter(help="Arrivals per second, swept.")] = "1,2,4,8",
    num_prompts: Annotated[int, Parameter(converter=integer, help="Requests at each rate.")] = 120,
    input_len: Annotated[int, Parameter(converter=integer, help="Prompt tokens, spread by 50%.")] = 256,
    output_len: Annotated[
        int, Parameter(converter=integer, help="Output tokens, spread by 50%: few, so that a step shows.")
    ] = 16,
    rounds: Annotated[
        int, Parameter(converter=integer, help="Measure everything so often, with a seed each; a P99 needs many gaps.")
    ] = 1,
    seed: Annotated[int, Parameter(converter=integer, help="Of lengths and arrivals; of the first round.")] = 300,
    profile: Annotated[
        bool, Parameter(help="Measure what a step costs, and simulate the same load with these costs.")
    ] = True,
    json: Json = None,
) -> None:
    """Run the before/after experiment on real processes of this machine.

    Two ranks share a mixture of experts and step together; DecodeBench delivers the prompts, a random EAGLE-3 model
    drafts, 2.53 tokens are accepted a step. Once requests that reach an idle rank are not padded to the verifier's
    width, once they are. Takes minutes.
    """
    try:
        from paceline.bench.line import LineOptions, measure_line, parse_rates
        from paceline.bench.line_lab import simulate_line
        from paceline.bench.served import ServerFailed
    except ModuleNotFoundError as error:
        raise CommandError(f"this bench needs {error.name}: pip install 'paceline[engine,serve]'") from error
    from paceline.cli.bench_serve import stages

    check_target(json, "--json")
    folder = work_dir or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "paceline" / "line"
    target = (model or folder / "smollm2-4x").resolve()
    head = (draft or folder / f"{target.name}-eagle3").resolve()
    # Before anything is made: what is wrong with the options is told at once.
    options = LineOptions(
        model=target,
        draft=head,
        ranks=ranks,
        quantization=quantization,
        max_num_seqs=max_num_seqs,
        request_rates=parse_rates(request_rates),
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        rounds=rounds,
        seed=seed,
    )
    if model is None:
        _make(target, "upcycle", "smollm2", "--dtype", "bfloat16")
    if draft is None:
        _make(head, "random-eagle3", str(target))
    try:
        result = measure_line(replace(options, vocab_size=_vocab_size(target)), stages(True), profile=profile)
    except ServerFailed as error:
        raise CommandError(str(error)) from error
    _report(result, simulate_line(result), json)


def _report(result: LineResult, simulated: Simulated | None, json: str | None) -> None:
    """Write the result file, the table and the chart.

    Raises:
        CommandError: requests failed; everything is written all the same.
    """
    from paceline.bench.line import rates_json

    if json is not None:
        data: dict[str, object] = {"rates": rates_json(result), "acceptance_length": result.acceptance_length}
        if result.profile is not None and simulated is not None:
            data["profile"] = {"full_itl_ms": result.profile.full, "eager_itl_ms": result.profile.eager}
            data["simulated"] = simulated.to_json()
        write_json(data, json)
    if json != STDOUT:
        _show(result, simulated)
    if result.failures:
        [(reason, count)] = result.failures.most_common(1)
        raise CommandError(
            f"{result.failures.total()} requests failed, {count} of them so: {reason}; the figures are of the others"
        )


def _make(target: Path, command: str, source: str, *flags: str) -> None:
    """Let ``paceline command source`` write the folder ``target`` if it is not there."""
    if not (target / "config.json").exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        stderr().print(f"making {target} with paceline {command}")
        done = subprocess.run([sys.executable, "-m", "paceline", command, source, str(target), *flags], check=False)
        if done.returncode:
            raise CommandError(f"paceline {command} ended with status {done.returncode}")


def _vocab_size(model: Path) -> int:
    """How many ids random prompts may have.

    Raises:
        CommandError: this is no model folder.
    """
    from paceline.bench.line import VOCAB_SIZE

    config = model / "config.json"
    try:
        known = msgspec.json.decode(config.read_bytes())["vocab_size"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CommandError(f"--model: no vocab_size in {str(config)!r} ({error}); name a model folder") from error
    return min(VOCAB_SIZE, int(known))


def _show(result: LineResult, simulated: Simulated | None) -> None:
    console = stdout()
    table = Table("req/s", "pad_resumed", "P50 ITL, ms", "P99 ITL, ms", "FULL", "misses", "steps", "idle admissions",
                  "accepted", box=box.SIMPLE_HEAD)  # fmt: skip
    for rate in result.options.request_rates:
        for name, measured, runs in (
            ("running", result.before[rate], simulated and simulated.before),
            ("resumed", result.after[rate], simulated and simulated.after),
        ):
            table.add_row(f"{rate:g}", name, *_cells(measured, runs[rate] if runs else None))
    console.print(table)
    console.print(
        f"Accepted in all: {result.acceptance_length:.3f} tokens a verification; the rates given come to"
        f" {result.options.acceptance_length:.3f}."
    )
    if simulated is not None:
        cost = simulated.cost
        console.print(
            f"In brackets: simulated, with steps of {cost.step_base_ms:.1f} ms in FULL and {cost.eager_step_ms:.1f} ms"
            f" eagerly, and {cost.per_group_row_ms:.2f} ms for each row of the group (profiled on these ranks)."
        )
    console.print(chart(result))


def _cells(measured: Measured, expected: Expected | None) -> list[str]:
    counts = measured.counts
    figures = [f"{measured.itl.p(50):.1f}", f"{measured.itl.p(99):.1f}", f"{counts.full_step_share:.1%}"]
    if expected is not None:
        p50, p99, share = map(expected.median, ("p50_itl_ms", "p99_itl_ms", "full_step_share"))
        beside = (f"{p50:.1f}", f"{p99:.1f}", f"{share:.1%}")
        figures = [f"{real} ({simulated})" for real, simulated in zip(figures, beside, strict=True)]
    return [
        *figures,
        ", ".join(f"{reason} {count}" for reason, count in counts.misses.items()) or "none",
        str(counts.group_steps),
        str(counts.idle_rank_admissions),
        f"{counts.acceptance_length:.3f}",
    ]


def chart(result: LineResult) -> str:
    """P99 ITL as bars, before above after at each rate."""
    longest = max(side[rate].itl.p(99) for side in (result.before, result.after) for rate in side)
    lines = ["P99 ITL"]
    for rate in result.options.request_rates:
        for name, side in (("running", result.before), ("resumed", result.after)):
            value = side[rate].itl.p(99)
            bar = "█" * max(1, round(BAR_COLUMNS * value / longest)) if longest else ""
            lines.append(f"{rate:>6g}/s {name} {bar} {value:.0f} ms")
    return "\n".join(lines)
