# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.parallel.program RANK RANKS PORT FOLDER``: one rank of a group that shares the experts of mixtures.

FOLDER holds a model per family. The ranks run every scenario in every exchange in step, and each writes what its own
sequences yielded to FOLDER.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from paceline.core.graphs import FULL, NONE
from paceline.engine.line import PeerLost
from paceline.models.experts import ExpertExchange
from paceline.models.llama import Llama
from paceline.models.registry import load_model
from paceline.parallel.exchange import GroupExchange, connect
from paceline.parallel.shared import SharedExchange

DEADLINE_S = 60.0
W = 4
"""Tokens of a dummy."""
SEQUENCES = {
    "a": [(7 * i * i + 3) % 256 for i in range(13)],
    "b": [(5 * i + 11) % 256 for i in range(21)],
    "c": [200],
    "d": [(i * i * i + 1) % 256 for i in range(34)],
}
SCENARIOS: dict[str, tuple[str, ...]] = {
    # The sequences of each rank in turn; further ranks have none.
    "first": ("a",),
    "second": ("", "a"),
    "both": ("a", "b"),
    "uneven": ("c", "abd"),
    "crowd": ("bc", "d", "a"),
}
CONTINUED = ("both", "crowd")
"""Scenarios in which sequences are continued, and forwards padded."""
GREEDY = 4
"""Tokens by which each sequence is continued."""
EXCHANGES = ("shared FULL", "shared NONE", "collectives FULL", "gathering FULL", "collectives NONE")


class Segments:
    """Causal attention of whole sequences that stand one after the other, without a cache."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = []
        for parts in zip(*(x.split(self.lengths) for x in (q, k, v)), strict=True):
            heads = [x.transpose(0, 1)[None] for x in parts]
            attended = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
            out.append(attended[0].transpose(0, 1).flatten(1))
        return torch.cat(out)


def step(model: Llama, sequences: list[list[int]], mode: int, size: int, padded: bool) -> list[Tensor]:
    """Logits of each sequence; a rank without sequences runs a dummy. ``padded``: up to ``size`` tokens."""
    assert model.exchange is not None
    rows = sequences or [[0] * W]
    lengths = [len(ids) for ids in rows]
    if padded and size > sum(lengths):
        # In front, so that a mask and no count says which rows are inert.
        rows, lengths = [[9] * (size - sum(lengths)), *rows], [size - sum(lengths), *lengths]
    inert = torch.zeros(sum(lengths), dtype=torch.bool)
    inert[: sum(lengths) if not sequences else sum(lengths) - sum(map(len, sequences))] = True
    model.exchange.begin(mode, size, inert)
    tokens = torch.tensor([token for ids in rows for token in ids])
    positions = torch.cat([torch.arange(n) for n in lengths])
    logits = model.logits(model.forward(tokens, positions, Segments(lengths))).split(lengths)
    return list(logits[len(lengths) - len(sequences) :])


def agreed_size(sequences: list[list[int]], mode: int) -> int:
    """In FULL the most tokens that a rank has, rounded up as capture sizes are."""
    most = torch.tensor(sum(map(len, sequences)) or W)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return -(-int(most) // W) * W if mode == FULL else 0


def run(model: Llama, names: str, mode: int, continued: bool) -> dict[str, Any]:
    """Logits of the sequences ``names`` run together, and how they go on."""
    sequences = [list(SEQUENCES[name]) for name in names]
    first = step(model, sequences, mode, agreed_size(sequences, mode), continued)
    logits = first
    for _ in range(GREEDY if continued else 0):
        sequences = [[*ids, int(row[-1].argmax())] for ids, row in zip(sequences, logits, strict=True)]
        logits = step(model, sequences, mode, agreed_size(sequences, mode), continued)
    return {
        name: {"logits": logits, "tokens": ids[len(SEQUENCES[name]) :]}
        for name, logits, ids in zip(names, first, sequences, strict=True)
    }


def exchanges() -> dict[str, tuple[ExpertExchange, int]]:
    """An exchange and a mode of each kind."""
    shared = connect(DEADLINE_S)
    assert isinstance(shared, SharedExchange)
    collectives, gathering = GroupExchange(), GroupExchange(gather=True)
    kinds: tuple[tuple[ExpertExchange, int], ...] = (
        (shared, FULL),
        (shared, NONE),
        (collectives, FULL),
        (gathering, FULL),
        (collectives, NONE),
    )
    return dict(zip(EXCHANGES, kinds, strict=True))


def everything(folder: Path, rank: int) -> dict[Any, Any]:
    """Results by (family, exchange, scenario, sequence)."""
    results: dict[Any, Any] = {}
    for family in sorted(path.name for path in folder.iterdir() if path.is_dir()):
        for kind, (exchange, mode) in exchanges().items():
            model = load_model(folder / family, "float32", parallel=exchange).model
            for scenario, by_rank in SCENARIOS.items():
                names = by_rank[rank] if rank < len(by_rank) else ""
                found = run(model, names, mode, scenario in CONTINUED)
                results |= {(family, kind, scenario, name): result for name, result in found.items()}
    return results


def fewer_bits(folder: Path, rank: int) -> dict[Any, tuple[Tensor, Tensor]]:
    """Logits of a sequence of each of the first two ranks, shared and alone on a rank with all experts."""
    found: dict[Any, tuple[Tensor, Tensor]] = {}
    name = "ab"[rank : rank + 1]
    for options in ({"dtype": "bfloat16"}, {"quantization": "int8"}):
        whole = load_model(folder / "mixtral", **options).model
        for kind, (exchange, mode) in exchanges().items():
            model = load_model(folder / "mixtral", parallel=exchange, **options).model
            result = run(model, name, mode, continued=False)
            if name:
                [alone] = step(whole, [SEQUENCES[name]], mode, 0, padded=False)
                found[(*options.values(), kind)] = result[name]["logits"], alone
    return found


def out_of_step(folder: Path, rank: int) -> str:
    """What ranks are told that think of different terms."""
    model = load_model(folder / "mixtral", "float32", parallel=connect(DEADLINE_S)).model
    try:
        step(model, [SEQUENCES["a"]], NONE if rank else FULL, 0 if rank else 16, padded=False)
    except RuntimeError as error:
        return str(error)
    return ""


def too_many(folder: Path) -> str:
    """What a rank is told that brings more tokens than agreed on. All do, so that nobody waits."""
    model = load_model(folder / "mixtral", "float32", parallel=GroupExchange()).model
    try:
        step(model, [SEQUENCES["a"]], FULL, W, padded=False)
    except ValueError as error:
        return str(error)
    return ""


def unreachable(rank: int) -> str:
    """The exchange that ranks settle on when memory cannot be shared."""
    if rank == 0:
        kept, os.memfd_create = os.memfd_create, refuse_memory
    found = type(connect(DEADLINE_S)).__name__
    if rank == 0:
        os.memfd_create = kept
    return found


def refuse_memory(name: str, flags: int = 0) -> int:
    raise OSError("no memory to share")


def abandoned(ranks: int, rank: int) -> str:
    """What the others are told when the last rank leaves."""
    exchange = connect(1.0)
    assert isinstance(exchange, SharedExchange)
    if rank == ranks - 1:
        return ""
    try:
        exchange.board.share()
    except PeerLost as error:
        return str(error)
    return "nothing"


def main(rank: int, ranks: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    with torch.inference_mode():
        results = everything(folder, rank)
        results["fewer bits"] = fewer_bits(folder, rank) if ranks == 2 else {}
        results["out of step"] = out_of_step(folder, rank)
        results["too many"] = too_many(folder)
    results["unreachable"] = unreachable(rank)
    results["abandoned"] = abandoned(ranks, rank)
    torch.save(results, folder / f"{ranks}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
