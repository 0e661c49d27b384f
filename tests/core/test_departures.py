# SPDX-License-Identifier: Apache-2.0
"""Each deliberate departure from vLLM 0.32: what happens here, what would happen there, and that it is counted."""

from __future__ import annotations

import pytest

from paceline.connectors.decode_bench.scheduler import DecodeBenchScheduler
from paceline.core import departures as d
from paceline.core.plan import PLACEHOLDER
from paceline.core.request import State

from .driving import Drive, Offers, engine_config

PADDED = (PLACEHOLDER,) * 3


def verifiers(count: int, **config: object) -> Drive:
    """``count`` running requests with three drafts each, all of them one token behind."""
    drive = Drive(engine_config(K=3, **{"graphs": False, **config}))  # type: ignore[arg-type]
    for i in range(count):
        drive.running(f"r{i}", 8)
    return drive


def test_every_departure_has_a_reason_and_a_test() -> None:
    for name, reason in d.REASONS.items():
        assert len(reason.split()) > 5, f"{name} needs a reason, not {reason!r}"
        assert f"test_{name}" in globals(), f"no test of departure {name}"


def test_whole_row() -> None:
    """vLLM would cut the third row to the two tokens that are left."""
    drive = verifiers(3, budget=10)
    assert drive.s.departures[d.WHOLE_ROW] == 0
    assert next(iter(drive.step().values())).n == 4
    before = drive.s.departures[d.WHOLE_ROW]
    drive.plan()
    assert sorted(drive.widths().values()) == [4, 4]
    assert drive.s.departures[d.WHOLE_ROW] == before + 1


def test_round_robin() -> None:
    """vLLM begins every step with r0 and r1: r2 would get what they leave, or nothing, until one of them ends."""
    drive = verifiers(3, budget=10)
    served = [list(drive.step()) for _ in range(6)]
    assert all(len(rows) == 2 for rows in served)
    assert all(sum(f"r{i}" in rows for rows in served) == 4 for i in range(3))
    assert drive.s.departures[d.ROUND_ROBIN] > 0
    assert [r.id for r in drive.s.running] == ["r0", "r1", "r2"], "serving order is not list order"


def test_near_mml() -> None:
    """vLLM would keep the two drafts that still fit and run three tokens."""
    drive = Drive(engine_config(K=3, graphs=False, mml=36))
    request = drive.running("a", 32)
    assert (request.computed, request.drafts) == (32, (7, 7, 7))
    drive.plan()
    assert drive.widths() == {"a": 1}
    assert drive.current is not None
    assert drive.current.misses == ["near_mml"]
    assert drive.s.departures[d.NEAR_MML] == 1


def test_total_order() -> None:
    """Two requests of one priority and arrival that do not both fit preempt each other for ever in vLLM."""
    drive = Drive(
        engine_config(K=0, graphs=False, policy="priority", block_size=4, num_blocks=10, mml=32, caching=False)
    )
    first = drive.add("first", 12, max_tokens=20, arrival=0.0)
    second = drive.add("second", 12, max_tokens=20, arrival=0.0)
    drive.run(limit=200)
    assert drive.ended == {"first": "length", "second": "length"}
    assert (first.num_preemptions, second.num_preemptions) == (0, 1), "the later one gives way, once"
    assert drive.s.departures[d.TOTAL_ORDER] > 0


def test_unhash() -> None:
    """vLLM leaves the hashes of a row taken back: the next lookup hits KV that nobody computed."""
    drive = Drive(engine_config(K=0, graphs=False, policy="priority", block_size=4, num_blocks=10, mml=32, threshold=4))
    drive.add("another", 1, max_tokens=1)
    low = drive.add("low", 30, priority=2, max_tokens=2)
    drive.step()
    drive.add("high", 4, priority=0, max_tokens=20)
    drive.run(lambda: low.computed == 24)
    drive.plan()
    assert set(drive.rows()) == {"high"}, "tokens [24, 28) of low were planned, then high needed a block"
    assert drive.s.departures[d.UNHASH] == 1
    drive.commit()
    drive.s.abort("high")
    assert drive.step()["low"].start == 24


def test_self_victim() -> None:
    """vLLM ends the pass when a row preempts itself; the row behind it, which has its blocks, would wait."""
    drive = Drive(engine_config(K=0, graphs=False, policy="priority", block_size=4, num_blocks=10, mml=32))
    drive.add("worst", 15, priority=2)
    drive.step()
    drive.add("better", 17, priority=0)
    while "worst" in drive.step():
        pass
    assert drive.requests["worst"].state is State.PREEMPTED
    assert drive.s.departures[d.SELF_VICTIM] == 1


def test_no_blocks() -> None:
    """A row after 29 tokens without drafts would need a third block for its placeholders; vLLM never pads it."""
    drive = Drive(engine_config(K=3, num_blocks=5, mml=56))
    drive.running("a", 26, drafts=0)
    drive.running("b", 29, drafts=0)
    drive.plan()
    assert drive.widths() == {"a": 4, "b": 1}
    assert drive.current is not None
    assert drive.current.misses == ["no_blocks"]
    assert drive.s.departures[d.NO_BLOCKS] > 0
    assert drive.s.stats.preemptions == 0


def test_resolved_state() -> None:
    """A prompt of one token whose one token was loaded counts nothing as computed, and is not loaded again."""
    connector = Offers({"a": 1}, asynchronous=True)
    drive = Drive(engine_config(K=0, graphs=False), connector)
    request = drive.add("a", 1, max_tokens=2)
    drive.step()
    assert request.state is State.LOADING
    drive.loaded("a")
    assert drive.step()["a"].start == 0
    assert connector.loads == [("a", 1)]
    assert drive.s.departures[d.RESOLVED_STATE] == 1


def test_load_reserve() -> None:
    """Three blocks cover the load but not its first step too. Nobody runs who could free more: vLLM waits for ever."""
    drive = Drive(engine_config(K=3, graphs=False, num_blocks=4, mml=34), Offers({"a": 33}, asynchronous=True))
    request = drive.add("a", 33, max_tokens=1)
    drive.step()
    assert request.state is State.LOADING
    assert drive.s.departures[d.LOAD_RESERVE] == 1
    drive.loaded("a")
    drive.run(limit=10)
    assert drive.ended == {"a": "length"}


@pytest.mark.parametrize("fits", [True, False])
def test_provisional_padding(fits: bool) -> None:
    """A padded row yields to a prefill that is admitted, and to no other."""
    drive = Drive(engine_config(K=3, num_blocks=7, budget=64, mml=80))
    drive.running("a", 28, drafts=0)
    drive.add("prompt", 30 if fits else 75)
    drive.plan()
    rows = drive.rows()
    if fits:
        assert {name: row.n for name, row in rows.items()} == {"a": 1, "prompt": 30}
        assert drive.s.departures[d.PROVISIONAL_PADDING] == 1
    else:
        assert {name: row.drafts for name, row in rows.items()} == {"a": PADDED}
        assert drive.s.departures[d.PROVISIONAL_PADDING] == 0


def test_graph_padding() -> None:
    """vLLM would run two tokens here, and eagerly."""
    drive = Drive(engine_config(K=3))
    drive.running("a", 8, drafts=1)
    drive.plan()
    assert drive.rows()["a"].drafts == (7, PLACEHOLDER, PLACEHOLDER)
    assert drive.current is not None
    assert drive.current.width == 4
    assert drive.s.departures[d.GRAPH_PADDING] == 1


def test_prefill_threshold() -> None:
    """A threshold below W would cut vLLM's verifier rows to it."""
    drive = verifiers(2, threshold=2)
    drive.plan()
    assert drive.widths() == {"r0": 4, "r1": 4}
    assert drive.s.departures[d.PREFILL_THRESHOLD] > 0


def test_later_deadline() -> None:
    """vLLM would ask the connector for ever."""
    drive = Drive(engine_config(K=0, graphs=False, later_deadline_s=1.0), Offers(later=["a"]))
    drive.add("a", 20)
    assert drive.step() == {}
    drive.now += 2.0
    assert drive.step()["a"].n == 20
    assert drive.s.departures[d.LATER_DEADLINE] == 1


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_load_deadline(policy: str) -> None:
    """vLLM would wait for ever; the blocks stay out of use until the transport lets go of them."""
    drive = Drive(
        engine_config(K=0, graphs=False, transfer_deadline_s=1.0, load_failure_policy=policy),
        Offers({"a": 32}, asynchronous=True),
    )
    request = drive.add("a", 40)
    drive.step()
    held = set(request.tables[0])
    drive.now += 2.0
    rows = drive.step()
    assert drive.s.departures[d.LOAD_DEADLINE] == 1
    if policy == "fail":
        assert drive.ended == {"a": "error"}
    else:
        assert (rows["a"].start, rows["a"].n) == (0, 40)
    assert held <= set(drive.s.pool.owners())
    assert not held & set(request.tables[0] if request.tables else ())


def test_refill() -> None:
    """vLLM's benchmark connector fills a request once; after a preemption it would compute its whole prompt."""
    drive = Drive(engine_config(K=0, graphs=False, caching=False), DecodeBenchScheduler(16))
    request = drive.add("a", 100)
    drive.step()
    drive.s.preempt("a")
    row = drive.step()["a"]
    assert (row.start, row.n) == (request.num_tokens - 2, 1)
    assert drive.s.departures[d.REFILL] == 1


def test_row_error() -> None:
    """One poisoned row ends vLLM's engine; here it ends its request, and who hit its blocks starts over."""
    drive = Drive(engine_config(K=0, graphs=False))
    prompt = list(range(50, 82))
    drive.add("poisoned", [*prompt, 1], max_tokens=4)
    sharer = drive.add("sharer", [*prompt, 2], max_tokens=4)
    other = drive.add("other", 20, max_tokens=4)
    rows = drive.step(errors={"poisoned": "not finite"})
    assert rows["sharer"].start == 32, "it hits what the poisoned row was to compute in this very step"
    assert (drive.ended, drive.errors) == ({"poisoned": "error"}, {"poisoned": "not finite"})
    assert drive.tokens["sharer"] == []
    assert sharer.state is State.PREEMPTED
    assert drive.step()["sharer"].start == 0
    drive.run()
    assert len(drive.tokens["sharer"]) == len(drive.tokens["other"]) == other.params.max_tokens
    assert drive.s.departures[d.UNSAMPLED_ERROR] == 1
