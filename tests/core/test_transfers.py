# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of KV transfers: cases T1-T3, T7 and T9, deadlines and quarantine."""

from __future__ import annotations

import pytest

from paceline.core.config import GroupConfig
from paceline.core.plan import InvalidResult, TransferEvent
from paceline.core.request import Request, State

from .driving import Drive, Offers, engine_config
from .toy_model import ToyDrive

SIZES = [(0, 16, 40, 32), (3, 16, 40, 32), (3, 8, 40, 20), (1, 16, 17, 17)]
"""(K, block size, prompt, tokens that can be loaded)."""


def loading(K: int, bs: int, prompt: int, prefix: int, **config: object) -> tuple[ToyDrive, Request]:
    """A drive whose request ``r`` has just begun to load."""
    d = ToyDrive(engine_config(K=K, block_size=bs, **config), Offers({"r": prefix}, asynchronous=True))  # type: ignore[arg-type]
    request = d.add("r", prompt, max_tokens=20)
    d.step()
    assert request.state is State.LOADING
    return d, request


@pytest.mark.parametrize(("K", "bs", "prompt", "prefix"), SIZES)
def test_T1_an_abort_in_the_middle_of_a_load_holds_the_blocks_until_it_ends(
    K: int, bs: int, prompt: int, prefix: int
) -> None:
    d, request = loading(K, bs, prompt, prefix)
    held = d.owned()
    assert held == -(-prefix // bs), "blocks for what is loaded, and no more"
    d.s.abort("r")
    for _ in range(3):
        d.step()
        assert d.owned() == held
        assert d.s.has_work, "somebody must wait for the end of the load"
    assert d.ended == {"r": "abort"}
    event = TransferEvent("loaded", request.seq, request.generation)
    d.step(transfers=[event])
    assert d.owned() == 0
    assert not d.s.has_work
    d.plan()
    d.commit(transfers=[event])
    assert (d.owned(), d.s.stats.late_transfers) == (0, 1)


@pytest.mark.parametrize(("K", "bs", "prompt", "prefix"), SIZES)
def test_T1_an_abort_after_the_load_ended_frees_at_once(K: int, bs: int, prompt: int, prefix: int) -> None:
    d, _ = loading(K, bs, prompt, prefix)
    d.loaded("r")
    d.s.abort("r")
    assert d.owned() == 0
    d.step()
    assert not d.s.has_work


@pytest.mark.parametrize("order", [("loaded", "saved"), ("saved", "loaded")])
def test_T1_blocks_of_an_aborted_load_that_are_still_read_wait_for_both_ends(order: tuple[str, str]) -> None:
    d, request = loading(3, 16, 40, 32)
    assert isinstance(d.s.connector, Offers)
    d.s.connector.reads_after_finish = {"r"}
    d.s.abort("r")
    held = d.owned()
    for kind, left in zip(order, (held, 0), strict=True):
        d.step(transfers=[TransferEvent(kind, request.seq, request.generation)])
        assert d.owned() == left, f"after {kind}"


@pytest.mark.parametrize("arrived", [20, 1, 16, 31, 39, 40])
@pytest.mark.parametrize("K", [0, 3])
def test_T2_what_arrived_is_computed_and_not_rounded_to_blocks(K: int, arrived: int) -> None:
    d, _ = loading(K, 16, 40, arrived)
    d.plan()
    d.commit(transfers=[d.arrives("r", arrived)])
    row = d.step()["r"]
    assert row.start == min(arrived, 39), "the last token is computed here"
    assert row.n - len(row.drafts) == 40 - row.start
    d.run()
    d.assert_right()


@pytest.mark.parametrize("promised", [32, 40])
@pytest.mark.parametrize("arrived", [17, 5])
def test_T2_less_than_promised_is_less_computed(arrived: int, promised: int) -> None:
    d, _ = loading(3, 16, 40, promised)
    d.plan()
    d.commit(transfers=[d.arrives("r", arrived)])
    assert d.step()["r"].start == arrived
    d.run()
    d.assert_right()


@pytest.mark.parametrize("K", [0, 3])
def test_T2_loaded_blocks_are_hit_by_others_once_they_arrived(K: int) -> None:
    d, _ = loading(K, 16, 40, 32)
    twin = d.add("twin", range(1000, 1040), max_tokens=5)
    assert d.requests["r"].source.tokens(0, 40) == twin.source.tokens(0, 40)
    assert d.step()["twin"].start == 0, "nothing to hit before the load has ended"
    d.plan()
    d.commit(transfers=[d.arrives("r", 32)])
    d.add("late", range(1000, 1040), max_tokens=5)
    assert d.step()["late"].start == 32
    d.run()
    d.assert_right()


@pytest.mark.parametrize("first", ["wide", "narrow"])
@pytest.mark.parametrize("shared", [0, 4])
def test_T3_two_loads_that_do_not_fit_together_follow_each_other(first: str, shared: int) -> None:
    """Nine usable blocks; loads of eight and five blocks, of which they may share four."""
    lengths = {"wide": 8 * 16, "narrow": 5 * 16}
    d = ToyDrive(engine_config(K=0, num_blocks=10, mml=143), Offers(lengths, asynchronous=True))
    names = ["wide", "narrow"] if first == "wide" else ["narrow", "wide"]
    for name in names:
        body = range(2000, 2300) if name == "wide" else range(3000, 3300)
        d.add(name, [*range(shared * 16), *body][: lengths[name]], max_tokens=8)
    for _ in range(100):
        if not d.s.has_work:
            break
        d.plan()
        under_way = [r.id for r in d.s.holding if r.loading is not None and r.loading.arrived is None]
        d.commit(transfers=[d.arrives(name, lengths[name]) for name in under_way])
    assert set(d.ended.values()) == {"length"}
    assert len(d.ended) == 2
    d.assert_right()


def test_a_load_leaves_room_for_what_is_loading_and_starts_none_while_running_is_full() -> None:
    connector = Offers({"a": 48, "b": 48}, asynchronous=True)
    d = Drive(engine_config(K=3, num_blocks=8, mml=100, seqs=1), connector)
    d.add("a", 48)
    d.add("b", 48)
    d.step()
    assert [r.id for r in d.s.holding] == ["a"], "b wants 3, 1 for its first step, and 1 more for a, of the 4 left"
    d.add("c", 5)
    d.s.abort("b")
    d.step()
    assert d.s.num_running == 1
    d.add("d", 48)
    connector.prefix["d"] = 48
    d.step()
    assert "d" not in connector.asked, "running is full: nobody is even looked at"


@pytest.mark.parametrize("deadline_s", [0.05, 0.2])
@pytest.mark.parametrize("K", [0, 3])
def test_T7_later_for_ever_is_overruled_at_the_deadline_and_overtaken_before(K: int, deadline_s: float) -> None:
    connector = Offers(later=["slow"])
    d = ToyDrive(engine_config(K=K, later_deadline_s=deadline_s), connector)
    d.add("slow", 40, max_tokens=5)
    d.add("quick", 20, max_tokens=5)
    asked_at = d.now
    while "slow" not in (rows := d.step()):
        assert d.now - asked_at < deadline_s + 0.02
    assert rows["slow"].start == 0
    assert d.now - 0.01 - asked_at >= deadline_s
    d.run()
    assert list(d.ended) == (["quick", "slow"] if deadline_s > 0.1 else list(d.ended))
    d.assert_right()


def test_T7_an_answer_before_the_deadline_is_taken() -> None:
    connector = Offers({"r": 32}, later=["r"])
    d = Drive(engine_config(later_deadline_s=5.0), connector)
    d.add("r", 40)
    d.step()
    d.step()
    connector.later.clear()
    assert d.step()["r"].start == 32


def test_T7_the_deadline_counts_from_the_question_not_from_one_that_was_answered() -> None:
    connector = Offers({"r": 32}, later=["r"])
    d = Drive(engine_config(later_deadline_s=5.0, caching=False), connector)
    d.add("r", 40, max_tokens=400)
    d.step()
    connector.later.clear()
    assert "r" in d.step()
    d.now += 100.0
    d.s.preempt("r")
    connector.later.add("r")
    assert d.step() == {}, "asked again: it has five seconds again"
    connector.later.clear()
    assert d.step()["r"].start == 32


@pytest.mark.parametrize("kind", ["loaded", "saved", "loaded twice", "unknown sequence", "another generation"])
def test_T9_an_unknown_late_or_repeated_completion_is_counted_and_frees_nothing(kind: str) -> None:
    d, request = loading(3, 16, 40, 32)
    events = {
        "loaded": TransferEvent("loaded", request.seq, 0),
        "saved": TransferEvent("saved", request.seq, 0),
        "loaded twice": TransferEvent("loaded", request.seq, 0),
        "unknown sequence": TransferEvent("loaded", 99, 0),
        "another generation": TransferEvent("loaded", request.seq, 7),
    }
    held = d.owned()
    if kind.startswith("loaded"):
        d.plan()
        d.commit(transfers=[d.arrives("r", 32)] * (2 if kind == "loaded twice" else 1))
    else:
        d.step(transfers=[events[kind]])
    assert d.s.stats.late_transfers == (kind != "loaded")
    assert d.owned() == held
    assert request.state is State.LOADING
    assert (request.loading is not None and request.loading.arrived) == (32 if kind.startswith("loaded") else None)


def test_T9_a_completion_of_the_wrong_kind_does_not_free_the_blocks_of_an_aborted_load() -> None:
    d, request = loading(3, 16, 40, 32)
    held = d.owned()
    d.s.abort("r")
    d.step(transfers=[TransferEvent("saved", request.seq, 0)])
    assert d.owned() == held
    assert d.s.stats.late_transfers == 1


@pytest.mark.parametrize("count", [1, 2])
def test_a_finished_request_that_is_read_is_freed_when_the_last_reader_ends(count: int) -> None:
    d = Drive(engine_config(), connector := Offers())
    request = d.running("r", 40)
    for _ in range(count):
        d.s.fence("r")
    connector.reads_after_finish = {"r"}
    d.s.abort("r")
    held = d.owned()
    for left in range(count, -1, -1):
        assert d.s.has_work
        d.step(transfers=[TransferEvent("saved", request.seq, 0)])
        assert d.owned() == (held if left else 0)
    assert d.s.stats.late_transfers == 0


@pytest.mark.parametrize("K", [0, 3])
def test_a_fenced_victim_is_not_preempted_the_row_waits_instead(K: int) -> None:
    d = Drive(engine_config(K=K, num_blocks=5, mml=64 - 1 - K, caching=False))
    for name in ("r1", "r2"):
        request = d.add(name, 26, max_tokens=200)
        d.run(lambda request=request: request.num_tokens > request.num_prompt)  # type: ignore[misc]
    d.s.fence("r2")
    d.run(lambda: d.requests["r1"].computed + 1 + K > 32)
    before = d.requests["r1"].computed
    for _ in range(3):
        assert "r1" not in d.step()
    assert (d.requests["r1"].computed, d.s.stats.preemptions) == (before, 0)
    d.step(transfers=[TransferEvent("saved", d.requests["r2"].seq, 0)])
    d.run(lambda: d.requests["r1"].computed > before)
    assert d.s.stats.preemptions == 1


def test_a_window_moves_on_only_when_nobody_reads_what_it_leaves_behind() -> None:
    groups = (GroupConfig(), GroupConfig(kind="sliding", sliding_window=16))
    d = Drive(engine_config(K=0, groups=groups, caching=False))
    request = d.running("r", 60)
    d.s.fence("r")
    read = {b for b in request.tables[1] if b}
    for _ in range(40):
        d.step()
        assert read <= set(d.s.pool.owners())
    d.step(transfers=[TransferEvent("saved", request.seq, 0)])
    assert sum(map(bool, request.tables[1])) > 4
    d.run(lambda: sum(map(bool, request.tables[1])) <= 2, limit=20)


def test_a_sharer_that_starts_over_keeps_its_blocks_while_a_transfer_reads_them() -> None:
    d = Drive(engine_config(K=0))
    d.add("bad", range(40))
    sharer = d.add("sharer", range(40))
    d.plan()
    d.s.fence("sharer")
    table = list(sharer.tables[0])
    d.commit(errors={"bad": "poisoned"})
    assert set(table) <= set(d.s.pool.owners()), "its saved event has not come"
    d.step(transfers=[TransferEvent("saved", sharer.seq, 0)])
    assert (sharer.fences, d.s.stats.late_transfers) == (0, 0)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("ends", ["loaded", "error", "never"])
def test_a_load_past_its_deadline_is_given_up_and_its_blocks_are_quarantined(ends: str, policy: str) -> None:
    d = ToyDrive(
        engine_config(transfer_deadline_s=0.05, load_failure_policy=policy), Offers({"r": 32}, asynchronous=True)
    )
    request = d.add("r", 40, max_tokens=5)
    d.step()
    loaded = list(request.tables[0])
    d.run(lambda: d.s.transfers.num_quarantined_blocks > 0, limit=10)
    assert d.now - 0.01 >= 0.05
    d.run()
    assert d.ended == {"r": "error" if policy == "fail" else "length"}
    if policy == "fail":
        assert "deadline" in d.errors["r"]
    assert d.s.stats.load_failures == 1
    assert sorted(d.s.pool.owners()) == sorted(loaded), "nobody else gets blocks that a transport may still write"
    assert not d.s.has_work, "a quarantine is no work: waiting for it could be for ever"
    d.assert_right()
    if ends != "never":
        d.plan()
        error = "too late" if ends == "error" else None
        d.commit(transfers=[TransferEvent("loaded", request.seq, 0, error=error)])
        assert d.owned() == 0


def test_a_request_that_no_longer_fits_beside_the_quarantine_fails() -> None:
    d = Drive(
        engine_config(K=0, num_blocks=5, mml=60, transfer_deadline_s=0.05, load_failure_policy="recompute"),
        Offers({"r": 48}, asynchronous=True),
    )
    d.add("r", 50, max_tokens=3)
    d.run()
    assert d.ended == {"r": "error"}
    assert "deadline" in d.errors["r"]


def test_a_load_that_brings_nothing_is_not_tried_again_but_computed() -> None:
    """A connector that keeps promising and never delivers would otherwise be asked for ever."""
    connector = Offers({"r": 70}, asynchronous=True)
    d = ToyDrive(engine_config(K=3, method="eagle3", num_blocks=6, mml=73), connector)
    d.add("r", 70, max_tokens=2)
    d.step()
    d.loaded("r", 0)
    assert d.step()["r"].start == 0
    d.run()
    assert connector.loads == [("r", 70)]
    d.assert_right()


def test_a_load_that_brought_nothing_does_not_stand_before_those_that_hold_blocks() -> None:
    """Eight usable blocks: "empty" cannot start before "held", to which they are promised, has run."""
    lengths = {"empty": 48, "held": 16}
    d = ToyDrive(engine_config(K=1, num_blocks=9, mml=120), Offers(lengths, asynchronous=True))
    d.add("empty", 48, max_tokens=3)
    d.add("held", 78, max_tokens=3)
    d.step()
    assert {r.state for r in d.requests.values()} == {State.LOADING}
    d.plan()
    nothing = TransferEvent("loaded", d.requests["empty"].seq, 0, 0)
    d.commit(transfers=[nothing, d.arrives("held", 16)])
    for _ in range(30):
        d.plan()
        under_way = [r.id for r in d.s.holding if r.loading is not None and r.loading.arrived is None]
        d.commit(transfers=[d.arrives(name, lengths[name]) for name in under_way])
    assert d.ended == {"empty": "length", "held": "length"}
    d.assert_right()


def test_an_event_of_no_known_kind_is_refused_on_an_idle_rank_too_and_nothing_is_applied() -> None:
    d, request = loading(3, 16, 40, 32)
    d.s.abort("r")
    held = d.owned()
    events = [TransferEvent("loaded", request.seq, 0), TransferEvent("lost", request.seq, 0)]
    with pytest.raises(InvalidResult, match="kind 'lost' is not loaded or saved"):
        d.s.end_transfers(events)
    assert d.owned() == held
    d.s.end_transfers(events[:1])
    assert d.owned() == 0
