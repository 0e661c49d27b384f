# SPDX-License-Identifier: Apache-2.0
"""``paceline demo``: one scheduler on two clocks. A measured cluster simulated; a real model, offline, served, and as a
line of two ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich import box
from rich.table import Table
from rich.text import Text

from paceline.cli.output import CommandError, at_least, integer, progress_bar, stdout
from paceline.cli.sim import usable_cores

if TYPE_CHECKING:
    from paceline import LLM

SCENARIO = "kimi_k3_dep16"
VARY = "speculation.pad_resumed=running,resumed"
SWEEP = "workload.request_rate=2,3,4,5,6"
MODEL = "smollm2"
MAX_TOKENS = 80
K = 3
NGRAM = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
PROMPTS = (
    "What is the capital of France? Answer in one sentence.",
    "Rewrite in the past tense: I walk to the park. I see a dog. I feed the dog. I walk home.",
    "Write the numbers from 1 to 20, separated by commas.",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said to one prompt, and in how many seconds."""

    text: str
    token_ids: tuple[int, ...]
    seconds: float


def demo(
    *,
    seeds: Annotated[int, Parameter(converter=integer, help="Simulated runs of each cell.")] = 5,
) -> None:
    """A measured cluster beside the simulated one; a real model with n-gram speculation off and on; the model served;
    two ranks in lock-step, before and after.

    All parts run the same scheduler: the first on a virtual clock with sixteen ranks, the others on this machine.
    """
    from paceline.cli.demo_line import show_line
    from paceline.cli.demo_serving import show_server

    show_cluster(at_least(seeds, 1, "--seeds"))
    show_model()
    show_server()
    show_line()


def show_cluster(seeds: int) -> None:
    """The pull request's before/after table, simulated beside observed."""
    from paceline.sim.compare import compare, parse_settings
    from paceline.sim.report import comparison_table
    from paceline.sim.scenario import load_raw

    vary, sweep = parse_settings(VARY, "--vary"), parse_settings(SWEEP, "--sweep")
    console = stdout()
    console.print(
        "[bold]1. Sixteen decode ranks in lock-step, in virtual time[/bold]\n"
        "One rank with a one-token row costs all sixteen their decode graph. A request whose KV has just arrived is\n"
        "such a row, unless it is padded: before (running) only beside running rows, after (resumed) always.\n"
    )
    with progress_bar("simulating") as progress:
        comparison = compare(load_raw(SCENARIO), vary, sweep, seeds=seeds, jobs=usable_cores(), progress=progress)
    console.print(comparison_table(comparison))


def show_model() -> None:
    """Three chat prompts answered greedily, speculation off and on."""
    console = stdout()
    # By default OpenMP's threads spin between operations; on cores shared with other programs that takes the time from
    # each other: 1 to 7 tok/s instead of 15, measured with two busy processes beside it on two cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    console.print("\n[bold]2. The same scheduler and a real model on this machine[/bold]\n")
    try:
        from paceline import LLM
    except ModuleNotFoundError as error:
        raise CommandError(
            f"the rest of the demo runs a real model and needs {error.name}: pip install 'paceline[engine,serve]'"
        ) from error
    with progress_bar("loading and answering") as progress:
        total = 2 * len(PROMPTS)
        off_llm = LLM(MODEL)
        off = []
        for answer in answers(off_llm):
            off.append(answer)
            progress(len(off), total)
        on_llm = LLM(off_llm.model, speculative_config=NGRAM)
        on = []
        for answer in answers(on_llm):
            on.append(answer)
            progress(len(off) + len(on), total)
    console.print(answers_table(off, on))
    same = all(a.token_ids == b.token_ids for a, b in zip(off, on, strict=True))
    console.print(
        f"{MODEL}, greedy, at most {MAX_TOKENS} tokens, one prompt at a time; tok/s with the prompt's time included.\n"
        f"off: {rate(off):.1f} tok/s.  on: {rate(on):.1f} tok/s, acceptance length"
        f" {on_llm.stats().acceptance_length:.2f}: mean tokens per verification of up to {K} drafts.\n"
        f"Token for token the same answers: {'yes' if same else 'NO'}."
    )


def answers(llm: LLM) -> Iterator[Answer]:
    """The model's answers to `PROMPTS`, one at a time, after a token to warm up."""
    from paceline import SamplingParams

    llm.generate("Hello", SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    for prompt in PROMPTS:
        began = time.perf_counter()
        messages = [{"role": "user", "content": prompt}]
        [result] = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS), use_tqdm=False)
        answer = result.outputs[0]
        yield Answer(answer.text, answer.token_ids, time.perf_counter() - began)


def rate(answered: list[Answer]) -> float:
    """Output tokens per second, prefill included."""
    return sum(len(a.token_ids) for a in answered) / sum(a.seconds for a in answered)


def answers_table(off: list[Answer], on: list[Answer]) -> Table:
    """Prompts and answers side by side."""
    table = Table("prompt", "n-gram speculation off", "on", box=box.SIMPLE_HEAD, padding=(0, 2, 1, 0))
    for prompt, a, b in zip(PROMPTS, off, on, strict=True):
        cells = (f"{x.text}\n[{len(x.token_ids)} tokens, {x.seconds:.1f} s]" for x in (a, b))
        table.add_row(prompt, *(Text(cell) for cell in cells))
    return table
