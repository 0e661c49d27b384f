# SPDX-License-Identifier: Apache-2.0
"""``paceline upcycle``: a dense model made a mixture of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from paceline.cli.output import CommandError, at_least, integer, progress_bar, stdout

EXAMPLES = """Examples:

  paceline upcycle smollm2 smollm2-moe
  paceline upcycle smollm2 smollm2-moe8 --experts 8 --top-k 2 --dtype bfloat16
  paceline serve smollm2-moe"""


def upcycle(
    model: Annotated[str, Parameter(help="A dense model: smollm2, a .gguf file, or a Hugging Face folder.")],
    out: Annotated[Path, Parameter(help="Folder to write; it must not be there, or be empty.")],
    *,
    experts: Annotated[int, Parameter(converter=integer, help="Experts in each layer.")] = 4,
    top_k: Annotated[int, Parameter(converter=integer, help="Experts that compute each token.")] = 2,
    seed: Annotated[int, Parameter(converter=integer, help="Another one draws other routers.")] = 0,
    dtype: Annotated[
        Literal["float32", "bfloat16"], Parameter(help="Of the weights written; float32 is exact and twice as large.")
    ] = "float32",
) -> None:
    """Make a mixture of experts of a dense model.

    It is there to run expert-parallel ranks on real text. Every expert is a
    copy of the layer's MLP; in front of them stands a random router, centred
    on real text so that each expert gets its share of the tokens. The weights
    of a token's experts add up to 1, so the mixture says what the dense model
    says, whichever experts are chosen: work is spread, text can be checked.

    OUT becomes a Hugging Face folder of the Mixtral architecture.
    """
    at_least(seed, 0, "--seed")
    try:
        from paceline.runtime.upcycle import upcycle_model
    except ModuleNotFoundError as error:
        raise CommandError(f"upcycle needs {error.name}: pip install 'paceline[engine]'") from error
    with progress_bar("layers") as progress:
        try:
            made = upcycle_model(model, out, experts=experts, top_k=top_k, seed=seed, dtype=dtype, progress=progress)
        except ValueError as error:
            raise CommandError(str(error)) from error
    stdout().print(
        f"{out}: {made.weight_bytes / 1e9:.2f} GB of weights, {experts} experts a layer, {top_k} for each token.\n"
        f"On sample text the least used expert of any layer gets {made.least_share:.0%} of the tokens,"
        f" the most used {made.most_share:.0%}; evenly spread, each would get {top_k / experts:.0%}."
    )
