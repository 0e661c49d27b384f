# SPDX-License-Identifier: Apache-2.0
"""``paceline bench graphs``: a decode step by the static backend against the same step by the general path."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from paceline.cli.bench import emit, parse_counts
from paceline.cli.bench_serve import stages
from paceline.cli.output import CommandError, Json, check_target, integer, progress_bar

MADE_OF = "smollm2"
EXPERTS, TOP_K = 4, 2


def graphs(
    *,
    model: Annotated[
        Path | None,
        Parameter(help="A folder with a mixture of experts; by default smollm2, upcycled to 4 experts for the while."),
    ] = None,
    sizes: Annotated[str, Parameter(help="Tokens of a step, one measurement each.")] = "4,8,16,32,64",
    num_speculative_tokens: Annotated[int, Parameter(converter=integer, help="K: rows have 1 + K tokens.")] = 3,
    context: Annotated[int, Parameter(converter=integer, help="Tokens before each row.")] = 100,
    ranks: Annotated[int, Parameter(converter=integer, help="Ranks that share the experts.")] = 2,
    steps: Annotated[int, Parameter(converter=integer, help="Timed steps of each kind; the median counts.")] = 60,
    json: Json = None,
) -> None:
    """Time a decode step FULL and eagerly, with the exchange between ranks and without; see `paceline.bench.graphs`."""
    from paceline.bench.graphs import GraphOptions, MeasurementFailed, run
    from paceline.bench.served import exit_on_sigterm

    try:
        from paceline.runtime.engine_group import shared_cores
    except ModuleNotFoundError as error:
        raise CommandError(f"this bench needs {error.name}: pip install 'paceline[engine,serve]'") from error
    check_target(json, "--json")
    options = GraphOptions(
        model=model or Path(MADE_OF),
        ranks=ranks,
        sizes=tuple(parse_counts(sizes, "--sizes")),
        num_speculative_tokens=num_speculative_tokens,
        context=context,
        steps=steps,
    )
    with exit_on_sigterm(), _mixture(model) as folder:
        try:
            result = run(replace(options, model=folder), shared_cores(os.environ, ranks), stages(True))
        except MeasurementFailed as error:
            raise CommandError(str(error)) from error
    emit(result if model is not None else {**result, "model": MADE_OF}, json)


@contextmanager
def _mixture(model: Path | None) -> Iterator[Path]:
    """``model``, or one that is made and thrown away."""
    if model is not None:
        yield model
        return
    try:
        from paceline.runtime.upcycle import upcycle_model
    except ModuleNotFoundError as error:
        raise CommandError(f"this bench needs {error.name}: pip install 'paceline[engine,serve]'") from error
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        made = Path(folder) / "mixture"
        with progress_bar(f"upcycling {MADE_OF}") as progress:
            try:
                upcycle_model(MADE_OF, made, experts=EXPERTS, top_k=TOP_K, seed=0, dtype="bfloat16", progress=progress)
            except ValueError as error:
                raise CommandError(str(error)) from error
        yield made
