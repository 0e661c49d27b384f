# SPDX-License-Identifier: Apache-2.0
"""``paceline random-eagle3``: a draft model that costs what a trained one costs, for benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from paceline.cli.output import CommandError, at_least, integer

EXAMPLES = """Examples:

  paceline random-eagle3 smollm2 head
  paceline random-eagle3 smollm2 head-4x2 --experts 4 --top-k 2
  paceline serve smollm2 --speculative-config '{"method": "eagle3",
      "model": "head", "num_speculative_tokens": 3,
      "rejection_sample_method": "synthetic",
      "synthetic_acceptance_rates": [0.7, 0.49, 0.3382]}'"""


def random_eagle3(
    target: Annotated[str, Parameter(help="The model to draft for: smollm2, a .gguf file, or a Hugging Face folder.")],
    out: Annotated[Path, Parameter(help="The folder to write; it must not hold a model already.")],
    /,
    *,
    draft_vocab_size: Annotated[
        int | None,
        Parameter(converter=integer, help="Tokens that can be drafted; by default 32000, or all if there are fewer."),
    ] = None,
    experts: Annotated[
        int, Parameter(converter=integer, help="Make the layer's MLP a mixture of so many experts; 0: a plain MLP.")
    ] = 0,
    top_k: Annotated[int, Parameter(converter=integer, help="Experts that compute a token.")] = 2,
    seed: Annotated[int, Parameter(converter=integer, help="The same seed writes the same weights.")] = 0,
) -> None:
    """Write a random EAGLE-3 draft model, in the form in which trained ones are published.

    It guesses nothing right and costs what a trained one of its size does:
    a decoder layer as wide as the target's, run once for each draft.
    Benchmarks accept its drafts at rates of their own
    (rejection_sample_method: synthetic). Otherwise every draft is verified, and
    the output is that of the target alone.
    """
    at_least(experts, 0, "--experts")
    at_least(seed, 0, "--seed")
    for name in ("config.json", "model.safetensors"):
        if (out / name).exists():
            raise CommandError(f"OUT: {str(out / name)!r} is there already; name another folder")
    try:
        from paceline.runtime.checkpoints import random_eagle3 as write
    except ModuleNotFoundError as error:
        raise CommandError(f"models need {error.name}: pip install 'paceline[engine]'") from error
    try:
        size = write(target, out, draft_vocab_size=draft_vocab_size, experts=experts, top_k=top_k, seed=seed)
    except ValueError as error:
        raise CommandError(str(error)) from error
    print(f"{out}: {size / 1e6:.1f} MB")
