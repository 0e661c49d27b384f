# SPDX-License-Identifier: Apache-2.0
"""Ask vLLM's scheduler about generated scenarios and store its answers.

    python -m tests.oracle.record --python /path/to/env/bin/python --oracle /path/to/vllm_oracle.py

The Python must have vLLM 0.32; the oracle script reads scenarios, one a line, and prints ``{"steps": [...]}`` or
``{"error": ..., "steps": [...]}`` for each, one step being what `unpack` returns. The file written is XZ-compressed
JSON lines: a header (generator seed, first index, counts, vLLM's version), then ``{"scenario", "steps", "error"?}``.
"""

from __future__ import annotations

import argparse
import json
import lzma
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .generate import Scenario, generate

DATA = Path(__file__).parent / "data" / "answers.jsonl.xz"
SAME = 0
"""Stands for a list of ids that is the one of the step before."""
QUEUES = ("running", "waiting", "holding")

Step = dict[str, Any]


def pack(scenario: Scenario, steps: list[Step]) -> list[list[Any]]:
    """Steps as short lists: ids become indices of ``requests``, mappings become flat lists."""
    index = {r["id"]: i for i, r in enumerate(scenario["requests"])}
    packed: list[list[Any]] = []
    before: dict[str, list[str]] = {}
    for step in steps:
        rows = [x for i, row in step["rows"].items() for x in (index[i], *row)]
        line: list[Any] = [rows, [index[i] for i in step["new"]], [index[i] for i in step["preempted"]]]
        line += [SAME if step[q] == before.get(q) else [index[i] for i in step[q]] for q in QUEUES]
        line += [[x for i, n in step["computed"].items() for x in (index[i], n)], step["free_blocks"]]
        before = {q: step[q] for q in QUEUES}
        packed.append(line)
    return packed


def unpack(scenario: Scenario, packed: list[list[Any]]) -> list[Step]:
    """The inverse of `pack`.

    Each step has ``rows`` {id: [tokens, drafts, placeholders]} in the order of the plan, ``new`` and ``preempted``
    ids, the queues ``running``, ``waiting`` and ``holding`` (waiting with blocks) after the commit, ``computed`` tokens
    of every unfinished request after the commit, and ``free_blocks``.
    """
    ids = [r["id"] for r in scenario["requests"]]
    steps: list[Step] = []
    queues: dict[str, list[str]] = {}
    for rows, new, preempted, running, waiting, holding, computed, free in packed:
        for queue, value in zip(QUEUES, (running, waiting, holding), strict=True):
            if value != SAME:
                queues[queue] = [ids[i] for i in value]
        steps.append(
            {
                "rows": {ids[rows[i]]: rows[i + 1 : i + 4] for i in range(0, len(rows), 4)},
                "new": [ids[i] for i in new],
                "preempted": [ids[i] for i in preempted],
                **queues,
                "computed": {ids[computed[i]]: computed[i + 1] for i in range(0, len(computed), 2)},
                "free_blocks": free,
            }
        )
    return steps


def load(path: Path = DATA) -> Iterator[tuple[Scenario, list[Step], str | None]]:
    """Stored scenarios with vLLM's steps and, where it refused or died after them, its error."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        next(file)
        for line in file:
            stored = json.loads(line)
            yield stored["scenario"], unpack(stored["scenario"], stored["steps"]), stored.get("error")


def header(path: Path = DATA) -> dict[str, Any]:
    """Where a stored file came from: generator seed, first index, counts, vLLM's version."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        found: dict[str, Any] = json.loads(next(file))
    return found


def ask(python: str, oracle: str, scenarios: list[Scenario]) -> list[dict[str, Any]]:
    """vLLM's answers, in order, from one process."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        for scenario in scenarios:
            file.write(json.dumps(scenario) + "\n")
        file.flush()
        printed = subprocess.run([python, oracle, file.name], check=True, stdout=subprocess.PIPE, text=True).stdout
    answers = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    if len(answers) != len(scenarios):
        raise RuntimeError(f"{len(scenarios)} scenarios were asked, {len(answers)} answers came back")
    return answers


def main() -> None:
    """Generate, ask, store."""
    parser = argparse.ArgumentParser(description="Store vLLM's scheduling decisions on generated scenarios.")
    parser.add_argument("--python", required=True, help="a Python with vLLM")
    parser.add_argument("--oracle", required=True, help="the script that runs vLLM's scheduler")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--out", type=Path, default=DATA)
    options = parser.parse_args()
    version = subprocess.run(
        [options.python, "-c", "from importlib.metadata import version; print(version('vllm'))"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.strip()
    scenarios = [generate(options.seed, i) for i in range(options.first, options.first + options.count)]
    answers = ask(options.python, options.oracle, scenarios)
    head = {"seed": options.seed, "first": options.first, "scenarios": len(scenarios), "vllm": version}
    head["steps"] = sum(len(a["steps"]) for a in answers)
    head["errors"] = sum("error" in a for a in answers)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(options.out, "wt", encoding="utf-8", preset=9 | lzma.PRESET_EXTREME) as file:
        file.write(json.dumps(head) + "\n")
        for scenario, answer in zip(scenarios, answers, strict=True):
            line = {"scenario": scenario, "steps": pack(scenario, answer["steps"])}
            if "error" in answer:
                line["error"] = answer["error"]
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    print(f"{options.out}: {head}, {options.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
