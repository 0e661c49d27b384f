# SPDX-License-Identifier: Apache-2.0
"""What one rank's scheduling costs per row, without a model.

Timed, step by step: planning, plan construction, validation, commit, next drafts, outputs. Not timed: making up what a
model would have sampled. The cyclic collector is paused, as it is while the engine steps.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from numpy.random import Generator, default_rng

from paceline.core.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from paceline.core.plan import StepPlan, StepResult
from paceline.core.request import Request, SamplingParams, StoredTokens
from paceline.core.scheduler import Scheduler
from paceline.engine.collector import collector_paused

BLOCK_SIZE = 16
PROMPT = 256
ACCEPTANCE = (0.7, 0.49, 0.3382)
WARM_STEPS = 20
VOCAB = 30_000


def run(running: list[int], num_speculative_tokens: int, steps: int) -> dict[str, Any]:
    """Median microseconds per row over ``steps`` steps, for each number of running requests."""
    with collector_paused():
        rows = [{"running": n, "us_per_row": measure(n, num_speculative_tokens, steps)} for n in running]
    return {"rows": rows, "num_speculative_tokens": num_speculative_tokens, "steps": steps, "block_size": BLOCK_SIZE}


def measure(running: int, K: int, steps: int) -> float:
    """Microseconds per row of a step with ``running`` decode rows, context 257 and growing, prefix cache on."""
    rng = default_rng(0)
    scheduler = _full_scheduler(running, K, steps, rng)
    times = []
    for step in range(-WARM_STEPS, steps):
        began = time.perf_counter()
        plan = scheduler.plan(0.0)
        planned = time.perf_counter()
        result = _sample(plan, K, rng)
        sampled = time.perf_counter()
        outputs = scheduler.commit(result, 0.0)
        ended = time.perf_counter()
        if len(outputs) != running or len(plan.rows) != running:
            raise RuntimeError(f"{len(plan.rows)} rows and {len(outputs)} outputs in a step of {running}")
        if step >= 0:
            times.append(planned - began + ended - sampled)
    return statistics.median(times) / running * 1e6


def _full_scheduler(running: int, K: int, steps: int, rng: Generator) -> Scheduler:
    """A scheduler whose requests have all computed their prompts."""
    length = PROMPT + (1 + K) * (steps + WARM_STEPS + 8)
    blocks = running * -(-(length + 2 * (1 + K)) // BLOCK_SIZE)
    speculation = SpeculationConfig()
    if K:
        speculation = SpeculationConfig(method="eagle3", num_speculative_tokens=K, disable_eagle_block_drop=True)
    scheduler = Scheduler(
        EngineConfig(
            scheduler=SchedulerConfig(
                max_num_seqs=running,
                max_num_batched_tokens=running * max(PROMPT, 1 + K),
                max_model_len=length,
            ),
            cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=blocks + 1),
            speculation=speculation,
        )
    )
    for i in range(running):
        prompt = StoredTokens(rng.integers(0, VOCAB, size=PROMPT).tolist())
        params = SamplingParams(max_tokens=length - PROMPT, stop_token_ids=(VOCAB + 1, VOCAB + 2))
        scheduler.add(Request(str(i), prompt, params, eos_token_id=VOCAB))
    while scheduler.waiting or any(r.computed < r.num_prompt for r in scheduler.running):
        plan = scheduler.plan(0.0)
        scheduler.commit(_sample(plan, K, rng), 0.0)
    return scheduler


def _sample(plan: StepPlan, K: int, rng: Generator) -> StepResult:
    """Plausible results: distinct tokens, drafts accepted at the rates of `ACCEPTANCE`."""
    count = len(plan.rows)
    rates = (ACCEPTANCE + (ACCEPTANCE[-1],) * K)[:K]
    lengths = [sum(u < rate for rate in rates) for u in rng.random(count).tolist()]
    tokens = rng.integers(0, VOCAB, size=(count, 1 + K)).tolist()
    sampled, nexts = [], []
    for row, a, ids in zip(plan.rows, lengths, tokens, strict=True):
        a = min(a, len(row.drafts))
        sampled.append((*row.drafts[:a], ids[0]) if row.samples else ())
        nexts.append(tuple(ids[1:]))
    return StepResult(plan.step, sampled, nexts)
