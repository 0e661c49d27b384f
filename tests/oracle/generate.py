# SPDX-License-Identifier: Apache-2.0
"""Random scheduling scenarios for the comparison with vLLM's scheduler.

    python -m tests.oracle.generate --seed 7 --count 100 > scenarios.jsonl

Scenario ``index`` of a seed depends on nothing but the two numbers. A scenario is a dictionary: ``engine`` (budgets
and pool), ``K`` drafts, ``lookahead`` and ``draft_slots`` of the drafter, ``policy``, ``connector`` (None,
``DecodeBenchConnector`` or ``mock``), ``requests``, ``aborts`` ([[step, id], ...]) and ``steps``, the most steps to
run. A request has an ``id``, the ``step`` of its arrival, a ``priority``, a ``prompt`` (token ids, or one token and a
length), ``max_tokens``, cycles of ``accept`` (drafts accepted per verified row) and ``drafts`` (drafts proposed per
sampled row), and with the mock connector a ``load``. Sampled tokens are all `SAMPLED_TOKEN`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from typing import Any

Scenario = dict[str, Any]

SAMPLED_TOKEN = 5
"""What every row samples; a prompt may go on with it and so repeat an earlier request's output."""


def generate(seed: int, index: int) -> Scenario:
    """Scenario number ``index`` of ``seed``.

    Seven of ten are *calm*: every decode row fits the budget whole and ends well before ``max_model_len``, so that
    the two schedulers are meant to agree to the end. The others are free within what the engine accepts at start.
    """
    rng = random.Random(f"{seed}:{index}")
    calm = rng.random() < 0.7
    K = rng.choice((0, 0, 1, 2, 3, 3, 4, 5))
    lookahead, draft_slots = rng.choice(((0, 0), (0, 0), (K, 0), (K, 1))) if K else (0, 0)
    scenario: Scenario = {
        "id": f"{seed}:{index}",
        "K": K,
        "lookahead": lookahead,
        "draft_slots": draft_slots,
        "policy": rng.choice(("fcfs", "fcfs", "priority")),
        "connector": rng.choice((None, None, None, "DecodeBenchConnector", "mock", "mock")),
        "steps": 100,
    }
    engine = scenario["engine"] = _budgets(rng, calm, K, draft_slots)
    scenario["requests"] = _requests(rng, calm, scenario)
    engine["num_blocks"] = _num_blocks(rng, scenario)
    if scenario["connector"] == "mock":
        _add_loads(rng, calm, scenario)
    scenario["aborts"] = _aborts(rng, scenario)
    return scenario


def _budgets(rng: random.Random, calm: bool, K: int, draft_slots: int) -> dict[str, Any]:
    width = 1 + K + draft_slots
    seqs = rng.choice((1, 2, 3, 4, 4, 5, 6, 8))
    large = rng.random() < 0.1
    if calm:
        budget = width * seqs + rng.choice((0, 3, 8, 16, 40, 100, 400))
    else:
        budget = rng.choice((width, width + 1, 2 * width + 1, 12, 20, 33, 64, 256))
    threshold = 0
    if rng.random() < 0.3:
        threshold = width + rng.randint(0, 12) if calm else rng.randint(1, 16)
    return {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": max(budget, width, seqs),  # vLLM refuses less than max_num_seqs
        "max_model_len": rng.choice((256, 400)) if large else rng.choice((24, 32, 40, 48, 64, 80, 96, 128)),
        "block_size": rng.choice((8, 16)) if large else rng.choice((1, 2, 3, 4, 4, 4, 8, 8, 16)),
        "prefix_caching": rng.random() < 0.75,
        "long_prefill_token_threshold": threshold,
    }


def _requests(rng: random.Random, calm: bool, scenario: Scenario) -> list[dict[str, Any]]:
    K, mml = scenario["K"], scenario["engine"]["max_model_len"]
    count = rng.choice((1, 2, 3, 4, 4, 5, 5, 6, 8, 10))
    gap = rng.choice((0, 0, 1, 2, 5))
    stems = [rng.randint(1, mml // 2) for _ in range(rng.choice((1, 1, 2)))]
    shared = rng.choice((0.0, 0.5, 0.9))
    short_drafts = rng.random() < 0.4
    requests: list[dict[str, Any]] = []
    taken: set[tuple[int, int]] = set()
    step = 0
    for i in range(count):
        step += rng.randint(0, gap)
        ceiling = mml - K if calm else mml  # calm: the last verifier row still fits whole
        prompt = _prompt(rng, i, ceiling - 1, stems, shared, requests)
        room = ceiling - _size(prompt)
        most = room if rng.random() < 0.4 else min(room, 12)
        priority = 0 if scenario["policy"] == "fcfs" else rng.randint(0, 2)
        while (priority, step) in taken:
            priority += 1
        taken.add((priority, step))
        request = {"id": f"r{i}", "step": step, "prompt": prompt, "max_tokens": rng.randint(1, most)}
        if (not calm or K == 0) and rng.random() < 0.2:
            request["max_tokens"] = mml
        if priority:
            request["priority"] = priority
        if K:
            request["accept"] = [rng.randint(0, K) for _ in range(rng.randint(1, 4))]
            if short_drafts:
                request["drafts"] = [rng.randint(0, K) for _ in range(rng.randint(1, 4))]
        requests.append(request)
    return requests


def _prompt(
    rng: random.Random,
    i: int,
    longest: int,
    stems: list[int],
    shared: float,
    earlier: list[dict[str, Any]],
) -> list[int] | dict[str, int]:
    """A prompt of at most ``longest`` tokens: alone, with a common stem, or a second turn of an earlier request."""
    draw = rng.random()
    if draw >= shared:
        return {"token": 1000 + i, "len": rng.randint(1, longest)}
    if earlier and draw < 0.25 * shared:
        first = earlier[rng.randrange(len(earlier))]["prompt"]
        ids = list(first) if isinstance(first, list) else [first["token"]] * first["len"]
        ids += [SAMPLED_TOKEN] * rng.randint(0, 12)
    else:
        stem = rng.randrange(len(stems))
        ids = [100 + stem] * stems[stem]
    ids += [1000 + i] * rng.choice((0, 1, 2, 3, 5, 8, 13, 21))
    return ids[:longest]


def _size(prompt: list[int] | dict[str, int]) -> int:
    return len(prompt) if isinstance(prompt, list) else prompt["len"]


def _num_blocks(rng: random.Random, scenario: Scenario) -> int:
    """From the smallest pool that the engine accepts to one that never fills; one block more is the null block."""
    engine, K = scenario["engine"], scenario["K"]
    size: int = engine["block_size"]
    least: int = -(-(engine["max_model_len"] + 1 + K + scenario["lookahead"]) // size)
    demand = sum(-(-(_size(r["prompt"]) + K + scenario["lookahead"]) // size) + 1 for r in scenario["requests"])
    tight = rng.random()
    if tight < 0.6:
        usable = least + rng.randint(0, 3)
    elif tight < 0.8:
        usable = max(least, round(demand * rng.uniform(0.4, 1.0)))
    else:
        usable = least + 2 * demand + 8
    return usable + 1


def _add_loads(rng: random.Random, calm: bool, scenario: Scenario) -> None:
    """What the mock connector can load for each request, when it answers and how long a load takes."""
    kind = rng.choice(("sync", "async", "async", "mixed"))
    later, once = rng.random() < 0.35, rng.random() < 0.3
    for request in scenario["requests"]:
        if rng.random() < 0.15:
            continue
        length, size = _size(request["prompt"]), scenario["engine"]["block_size"]
        load: dict[str, Any] = {
            "tokens": rng.choice((length, length - 1, length // size * size, rng.randint(0, length), 10**6))
        }
        if kind == "async" or (kind == "mixed" and rng.random() < 0.5):
            if calm and length == 1:
                continue
            load["async"] = True
            load["steps"] = rng.choice((0, 1, 1, 2, 3, 5, 9))
        if later and rng.random() < 0.7:
            load["later"] = rng.choice((1, 2, 3, 6))
        if once:
            load["once"] = True
        request["load"] = load


def _aborts(rng: random.Random, scenario: Scenario) -> list[list[Any]]:
    """At most two aborts, at most one of a request that may be loading: two that end together have no order."""
    if rng.random() < 0.7:
        return []
    requests = scenario["requests"]
    chosen = rng.sample(requests, min(len(requests), rng.choice((1, 1, 2))))
    loading = [r for r in chosen if r.get("load", {}).get("async")]
    aborts = [[r["step"] + rng.choice((0, 1, 2, 3, 5, 8, 13)), r["id"]] for r in chosen if r not in loading[1:]]
    return sorted(aborts)


def main() -> None:
    """Write scenarios, one a line."""
    parser = argparse.ArgumentParser(description="Write random scheduling scenarios, one JSON object a line.")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="index of the first scenario")
    options = parser.parse_args()
    for index in range(options.first, options.first + options.count):
        sys.stdout.write(json.dumps(generate(options.seed, index), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
