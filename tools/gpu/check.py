# SPDX-License-Identifier: Apache-2.0
"""Compare and time decode steps on a GPU: ``python -m tools.gpu.check`` (`make gpu` calls it); some five minutes.

It needs paceline's sources and, of other packages, only torch (a CUDA build of the version that pyproject.toml names),
numpy and msgspec. Models are random and made in memory, so nothing is read or downloaded:

    PYTHONPATH=src python -m tools.gpu.check --json gpu.json

First, in float32: the tokens of a tiny dense model and a tiny mixture, without drafts and with three drafters, on the
CPU, on the GPU by the general path, and on the GPU by CUDA graphs. Then, in bfloat16, what a mixture's experts yield on
the GPU, beside float32 on the CPU; and how long a decode step takes by either path, of a model of SmolLM2-135M's size
and of one whose layers are mixtures. The status is 0 if all tokens agree, and the experts' sums nearly; 1 if not; 2
without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tools.gpu.stand_ins import stand_in

MISSING = stand_in()
# Set in images of NVIDIA's, and stronger than what the program says: float32 would be multiplied in fewer bits.
os.environ.pop("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", None)

import torch  # noqa: E402 (imports of paceline want the stand-ins first)

from paceline.core.config import (  # noqa: E402
    CacheConfig,
    EngineConfig,
    GraphConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from paceline.core.graphs import FULL, GraphDispatcher  # noqa: E402
from paceline.core.lockstep import RUN, Agreement, agree  # noqa: E402
from paceline.core.plan import BlockUpdate, NewSequence, Row, StepPlan  # noqa: E402
from paceline.core.request import Request, SamplingParams, StoredTokens  # noqa: E402
from paceline.core.scheduler import Scheduler  # noqa: E402
from paceline.engine.rank import Rank  # noqa: E402
from paceline.execution.runner import ModelExecutor  # noqa: E402
from paceline.models.experts import Mixture, Routed, groups_on_device  # noqa: E402
from paceline.models.spec import ExpertConfig, LlamaConfig  # noqa: E402
from tools.gpu.models import SMOLLM2, TINY, TINY_MIXTURE, random_head, random_model  # noqa: E402

NO_GPU, DIFFERENT = 2, 1
K, LENGTH = 3, 48
SYNTHETIC = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": (0.8, 0.6, 0.4)}
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"method": "ngram", "num_speculative_tokens": K},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": K, "model": "random"},
    "eagle3, synthetic": {"method": "eagle3", "num_speculative_tokens": K, "model": "random", **SYNTHETIC},
}
# The second repeats itself, so that prompt lookup finds something.
PROMPTS = [
    [(7 * i * i + 3) % 256 for i in range(13)],
    [5, 9, 11, 13] * 8,
    [200, 7, 9],
    [(5 * i) % 256 for i in range(90)],
]
SIZES, CONTEXT, WARM_UPS, STEPS = (4, 8, 16, 32, 64), 512, 5, 30
BLOCK_SIZE = 16
MIXTURE = replace(SMOLLM2, experts=ExpertConfig(num_experts=8, top_k=2, intermediate_size=512, normalise=True))
NEAR = 0.05
"""How far sums of experts in bfloat16 may be from those in float32, of the largest of these."""


@dataclass(frozen=True)
class Compared:
    """Tokens of one model and method by the three ways; ``steps``: how many of them were FULL."""

    model: str
    method: str
    general_equals_cpu: bool
    graphs_equal_cpu: bool
    graphs_equal_general: bool
    steps: int


@dataclass(frozen=True)
class Timed:
    """Milliseconds of a decode step of ``tokens`` tokens, medians."""

    tokens: int
    general_ms: float
    graph_ms: float


def tokens_of(shape: LlamaConfig, method: str, device: str, graphs: bool) -> tuple[list[list[int]], int]:
    """Greedy tokens of all prompts under the real scheduler, and the number of FULL steps."""
    config = EngineConfig(
        scheduler=SchedulerConfig(max_num_seqs=4, max_model_len=512, max_num_batched_tokens=128),
        cache=CacheConfig(num_blocks=300, block_size=BLOCK_SIZE),
        speculation=SpeculationConfig(**METHODS[method]),
        graphs=GraphConfig(mode="FULL_DECODE_ONLY" if graphs else "NONE"),
    )
    model = random_model(shape, torch.float32, device)
    draft = random_head(model) if method.startswith("eagle3") else None
    rank, dispatcher = Rank(Scheduler(config), ModelExecutor(model, config, draft=draft)), GraphDispatcher(config)
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    for i, prompt in enumerate(PROMPTS):
        rank.add(Request(str(i), StoredTokens(list(prompt)), params))
    outputs: list[list[int]] = [[] for _ in PROMPTS]
    step = full = 0
    while rank.has_work:
        rank.begin(0.0)
        agreement = agree([rank.vote(step, 0)], dispatcher)
        full += agreement.mode == FULL
        rank.launch(agreement)
        for output in rank.finish(rank.collect(), 0.0):
            outputs[int(output.request_id)] += output.token_ids
            if output.error:
                raise RuntimeError(f"request {output.request_id} failed: {output.error}")
        step += 1
    return outputs, full


def compare(device: str) -> list[Compared]:
    found = []
    for name, shape in (("dense", TINY), ("mixture", TINY_MIXTURE)):
        for method in METHODS:
            cpu, _ = tokens_of(shape, method, "cpu", False)
            general, _ = tokens_of(shape, method, device, False)
            graphs, steps = tokens_of(shape, method, device, True)
            found.append(Compared(name, method, general == cpu, graphs == cpu, graphs == general, steps))
            print(_row(found[-1]), flush=True)
    return found


def experts_off(device: str, shape: LlamaConfig = MIXTURE) -> tuple[bool, float]:
    """Whether products of experts are grouped on ``device``, and how far their sums in bfloat16 are from those in
    float32 on the CPU, of the largest of these."""
    one = replace(shape, num_layers=1)
    exact, rounded = random_model(one).layers[0].experts, random_model(one, torch.bfloat16, device).layers[0].experts
    assert isinstance(exact, Mixture)
    assert isinstance(rounded, Mixture)
    assert isinstance(rounded.gate_up, torch.Tensor)
    assert isinstance(rounded.down, torch.Tensor)
    with torch.inference_mode():
        hidden = torch.randn(64, one.hidden_size, generator=torch.Generator().manual_seed(1))
        experts, weights = exact.route(hidden)
        # Every fifth row chooses nobody, as a row of padding does.
        experts[::5] = exact.config.num_experts
        expected = exact.compute_grouped(Routed(hidden, experts, weights))
        routed = Routed(hidden.to(device, torch.bfloat16), experts.to(device), weights.to(device))
        off = (rounded.compute_static(routed).cpu() - expected).abs().max() / expected.abs().max()
    return groups_on_device(rounded.gate_up, rounded.down), float(off)


def time_steps(device: str, shape: LlamaConfig = SMOLLM2) -> tuple[list[Timed], float]:
    """A step of each size by the general path and by a graph, and the seconds that all captures took."""
    length = CONTEXT + 2 * (WARM_UPS + STEPS) + 1
    blocks = -(-length // BLOCK_SIZE)
    config = EngineConfig(
        scheduler=SchedulerConfig(max_num_seqs=SIZES[-1], max_model_len=2 * CONTEXT),
        cache=CacheConfig(num_blocks=1 + 2 * CONTEXT // BLOCK_SIZE * SIZES[-1], block_size=BLOCK_SIZE),
        graphs=GraphConfig(mode="FULL_DECODE_ONLY", capture_sizes=SIZES),
    )
    model = random_model(shape, torch.bfloat16, device)
    began = time.perf_counter()
    executor = ModelExecutor(model, config)
    captured = time.perf_counter() - began
    timed = []
    for size in SIZES:
        prompt = StoredTokens([7] * (CONTEXT + 1))
        first = [NewSequence(seq, "", prompt, SamplingParams(temperature=0.0)) for seq in range(size)]
        tables = [BlockUpdate(seq, 0, True, range(1 + seq * blocks, 1 + (seq + 1) * blocks)) for seq in range(size)]
        executor.launch(StepPlan(0, (), 0, 0, first, tables), None)
        executor.collect()
        start, means = CONTEXT, []
        for full in (False, True):
            agreement = Agreement(0, RUN, FULL, size, (size,), 0, False) if full else None
            took = []
            for _ in range(WARM_UPS + STEPS):
                rows = [Row(seq, start, 1, (), True) for seq in range(size)]
                began = time.perf_counter()
                executor.launch(StepPlan(0, rows, size, 1), agreement)
                executor.collect()
                took.append(1e3 * (time.perf_counter() - began))
                start += 1
            means.append(statistics.median(took[WARM_UPS:]))
        executor.launch(StepPlan(0, (), 0, 0, (), (), tuple(range(size))), None)
        executor.collect()
        timed.append(Timed(size, *means))
        print(f"{size:4} tokens   general {means[0]:8.3f} ms   graph {means[1]:8.3f} ms", flush=True)
    return timed, captured


def _row(c: Compared) -> str:
    said = [
        f"{what} {'equal' if same else 'DIFFER'}"
        for what, same in (
            ("general and CPU", c.general_equals_cpu),
            ("graphs and CPU", c.graphs_equal_cpu),
            ("graphs and general", c.graphs_equal_general),
        )
    ]
    return f"{c.model:8} {c.method:18} {'; '.join(said)}; {c.steps} FULL steps"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.check", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write what was found")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(
            f"gpu: PyTorch {torch.__version__} finds no GPU that it can use here, so nothing was checked.",
            file=sys.stderr,
        )
        return NO_GPU
    device = "cuda:0"
    about = {
        "gpu": torch.cuda.get_device_name(0),
        "capability": list(torch.cuda.get_device_capability(0)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "stood_in_for": MISSING,
    }
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    compared = compare(device)
    grouped, off = experts_off(device)
    print(f"experts in bfloat16, {'grouped' if grouped else 'each for every token'}: off by {off:.4f}", flush=True)
    timed, captured = time_steps(device)
    print("with mixtures:", flush=True)
    mixed, _ = time_steps(device, MIXTURE)
    print(f"captures took {captured:.1f} s; {torch.cuda.max_memory_allocated() >> 20} MiB were allocated at most")
    if options.json is not None:
        report = about | {
            "compared": [asdict(c) for c in compared],
            "experts_grouped": grouped,
            "experts_off": off,
            "step": [asdict(t) for t in timed],
            "mixture_step": [asdict(t) for t in mixed],
            "context_tokens": CONTEXT,
            "capture_s": captured,
            "max_allocated_bytes": torch.cuda.max_memory_allocated(),
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    agreed = off < NEAR and all(c.graphs_equal_general and c.general_equals_cpu for c in compared)
    return 0 if agreed else DIFFERENT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
