# SPDX-License-Identifier: Apache-2.0
"""A step's result is checked as a whole and then committed: stops, cuts, errors, aborts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from paceline.core.plan import InvalidResult, StepResult, TransferEvent
from paceline.core.request import FinishReason, State

from .driving import DRAFT, MODEL, Drive, Offers, engine_config
from .toy_model import ToyDrive

K = 3


def three_rows() -> Drive:
    """In flight: a decode row with drafts, a padded row, and a prefill chunk that does not sample."""
    d = Drive(engine_config(K=K, budget=48, graphs=True), Offers({"padded": 20}))
    d.running("decode", 20)
    d.add("padded", 21)
    d.step(drafts={"padded": 0, "decode": K})
    d.add("chunk", 100)
    d.plan()
    rows = d.rows()
    assert [(n, len(r.drafts), r.samples) for n, r in rows.items()] == [
        ("decode", 3, True), ("padded", 0, True), ("chunk", 0, False)
    ]  # fmt: skip
    return d


def broken(good: StepResult) -> dict[str, StepResult]:
    def change(**fields: Any) -> StepResult:
        return msgspec.structs.replace(good, **fields)

    decode, padded, chunk = good.sampled
    return {
        "another step": change(step=good.step + 1),
        "a row too few": change(sampled=good.sampled[:2]),
        "a row too many": change(sampled=[*good.sampled, ()]),
        "no token": change(sampled=[decode, (), chunk]),
        "a token for a chunk that does not sample": change(sampled=[decode, padded, (1,)]),
        "more tokens than drafts allow": change(sampled=[(DRAFT,) * 3 + (MODEL, MODEL), padded, chunk]),
        "two tokens without drafts": change(sampled=[decode, (1, 2), chunk]),
        "tokens that were not drafted": change(sampled=[(DRAFT + 1, MODEL), padded, chunk]),
        "a negative token": change(sampled=[(-1,), padded, chunk]),
        "a negative last token": change(sampled=[(DRAFT, -1), padded, chunk]),
        "a negative token in the last row": change(sampled=[decode, (-7,), chunk]),
        "drafts for too few rows": change(next_drafts=good.next_drafts[:1]),
        "too many drafts": change(next_drafts=[(1,) * (K + 1), (), ()]),
        "a placeholder among the next drafts": change(next_drafts=[(1,), (1, -1), ()]),
        "an error for no row": change(errors={3: "?"}),
        "an error for a negative row": change(errors={-1: "?"}),
        "a token beside an error": change(errors={0: "?"}),
        "a failed load without an error": change(failed_loads={0: ()}),
        "a failed load of no row": change(failed_loads={3: ()}),
    }


@pytest.mark.parametrize("what", list(broken(StepResult(0, [(), (), ()], [(), (), ()]))))
def test_one_invalid_row_anywhere_commits_nothing_at_all(what: str) -> None:
    d = three_rows()
    good = d.result(accept=2)
    before = {n: (r.computed, r.num_tokens, list(r.output), r.drafts, r.state) for n, r in d.requests.items()}
    stats = (d.s.stats.generated_tokens, list(d.s.stats.acceptance.accepted_lengths))
    with pytest.raises(InvalidResult):
        d.s.commit(broken(good)[what], d.now)
    after = {n: (r.computed, r.num_tokens, list(r.output), r.drafts, r.state) for n, r in d.requests.items()}
    assert after == before
    assert (d.s.stats.generated_tokens, list(d.s.stats.acceptance.accepted_lengths)) == stats
    with pytest.raises(RuntimeError, match="has not been committed"):
        d.s.plan(d.now)
    d.take(d.s.commit(good, d.now))
    assert d.tokens["decode"][-3:] == [DRAFT, DRAFT, MODEL]


def test_an_invalid_result_does_not_apply_its_transfers_either() -> None:
    d = Drive(engine_config(K=0), Offers({"load": 32}, asynchronous=True))
    d.running("r", 10)
    load = d.add("load", 40)
    d.step()
    d.plan()
    good = d.result(transfers=[TransferEvent("loaded", load.seq, 0)])
    with pytest.raises(InvalidResult):
        d.s.commit(msgspec.structs.replace(good, sampled=[()]), d.now)
    assert load.loading is not None
    assert load.loading.arrived is None


def test_nothing_is_committed_without_a_step_in_flight() -> None:
    d = Drive(engine_config())
    with pytest.raises(RuntimeError, match="no step is in flight"):
        d.s.commit(StepResult(0, ()), 0.0)


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_rejected_drafts_are_taken_back(accepted: int) -> None:
    d = Drive(engine_config(K=K))
    request = d.running("r", 20)
    start = request.computed
    d.step(accept=accepted)
    assert request.computed == start + 1 + accepted
    assert request.num_tokens == request.computed + 1


@pytest.mark.parametrize("at", [0, 1, 2, 3])
@pytest.mark.parametrize("eos", [True, False])
def test_S12_a_stop_id_among_accepted_tokens_cuts_behind_itself(eos: bool, at: int) -> None:
    STOP = 99
    d = Drive(engine_config(K=K))
    more = {"eos_token_id": STOP} if eos else {"stop_token_ids": (STOP,)}
    request = d.add("r", 20, max_tokens=50, **more)
    d.step()
    request.drafts = tuple(STOP if i == at else DRAFT for i in range(K))
    plan = d.plan()
    sampled = (*d.rows()["r"].drafts, STOP if at == K else MODEL)
    outputs = d.s.commit(StepResult(plan.step, [sampled], [(DRAFT,) * K]), d.now)
    assert [o.token_ids for o in outputs] == [(*[DRAFT] * at, STOP)]
    assert (outputs[0].finish_reason, outputs[0].stop_reason) == ("stop", None if eos else STOP)
    assert request.output.tolist() == [MODEL, *[DRAFT] * at, STOP]
    assert request.num_tokens == 20 + len(request.output)
    assert d.owned() == 0


def test_S12_a_stop_before_the_length_limit_is_a_stop_and_the_limit_before_a_stop_is_a_length() -> None:
    for limit, reason in ((3, "length"), (4, "stop")):
        d = Drive(engine_config(K=K))
        request = d.add("r", 20, max_tokens=limit, stop_token_ids=(99,))
        d.step()
        request.drafts = (DRAFT, DRAFT, 99)
        d.plan()
        d.commit(accept=3)
        assert d.ended == {"r": reason}
        assert len(d.tokens["r"]) == limit
        assert d.s.stats.generated_tokens == limit


@pytest.mark.parametrize("ignore", [True, False])
def test_ignore_eos_goes_on(ignore: bool) -> None:
    d = Drive(engine_config(K=0))
    d.add("r", 5, max_tokens=3, eos_token_id=MODEL, ignore_eos=ignore)
    d.run()
    assert d.tokens["r"] == [MODEL] * (3 if ignore else 1)
    assert d.ended == {"r": "length" if ignore else "stop"}


@pytest.mark.parametrize("which", ["decode", "padded", "chunk"])
def test_an_error_ends_its_request_and_no_other(which: str) -> None:
    d = three_rows()
    outputs = d.commit(errors={which: "not finite"})
    (failed,) = [o for o in outputs if o.error]
    assert (failed.request_id, failed.finish_reason, failed.error) == (which, "error", "not finite")
    assert d.ended == {which: "error"}
    assert d.requests[which].tables == []
    d.run()
    assert {n: r for n, r in d.ended.items() if n != which} == dict.fromkeys(set(d.requests) - {which}, "length")
    assert d.owned() == 0


@pytest.mark.parametrize("K", [0, 3])
def test_blocks_that_a_failed_row_should_have_written_serve_nobody(K: int) -> None:
    d = ToyDrive(engine_config(K=K))
    prompt = range(60)
    d.add("bad", prompt, max_tokens=9)
    d.step(errors={"bad": "poisoned"})
    assert d.ended == {"bad": "error"}
    d.add("next", prompt, max_tokens=9)
    assert d.step()["next"].start == 0
    d.run()
    d.assert_right()


@pytest.mark.parametrize("sharers", [1, 2, 3])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_whoever_read_blocks_of_a_failed_row_starts_over_in_order_and_says_nothing_wrong(
    policy: str, sharers: int
) -> None:
    d = ToyDrive(engine_config(K=0, policy=policy))
    prompt = range(60)
    d.add("bystander", 30, max_tokens=20)
    d.step()
    d.add("bad", prompt, max_tokens=9)
    names = [f"sharer{i}" for i in range(sharers)]
    for name in names:
        d.add(name, prompt, max_tokens=9)
    d.plan()
    assert [d.rows()[name].start for name in names] == [48] * sharers
    generated = d.s.stats.generated_tokens
    d.toy.blind = True
    d.commit(errors={"bad": "poisoned"})
    d.toy.blind = False
    assert [r.id for r in d.s.waiting] == names
    assert all(d.requests[name].num_preemptions == 1 for name in names)
    assert d.s.stats.generated_tokens == generated + 1, "only the bystander's token reached anyone"
    d.run()
    assert d.ended == {"bystander": "length", "bad": "error"} | dict.fromkeys(names, "length")
    d.assert_right()
    assert d.owned() == 0


def test_an_abort_in_flight_waits_for_the_commit_and_the_plan_stays_as_it_was() -> None:
    d = three_rows()
    plan = d.current
    assert plan is not None
    before = msgspec.msgpack.encode([plan.rows, plan.tokens, plan.width])
    d.s.abort("decode")
    d.s.abort("decode")
    d.s.abort("never heard of")
    assert d.requests["decode"].state is State.RUNNING
    assert msgspec.msgpack.encode([plan.rows, plan.tokens, plan.width]) == before
    outputs = d.commit(accept=1)
    mine = [o for o in outputs if o.request_id == "decode"]
    assert [(o.token_ids, o.finish_reason) for o in mine] == [((DRAFT, MODEL), None), ((), "abort")]
    assert "decode" not in d.step()


@pytest.mark.parametrize("when", ["waiting", "running", "part-way", "preempted"])
def test_an_abort_frees_everything_and_is_reported_once(when: str) -> None:
    d = Drive(engine_config(K=K, budget=32), connector := Offers())
    request = d.add("r", 100)
    if when != "waiting":
        d.step()
    if when in ("running", "preempted"):
        d.run(lambda: request.num_tokens > 100)
    if when == "preempted":
        d.s.preempt("r")
    d.s.abort("r")
    d.s.abort("r")
    assert (request.state, request.finish_reason, d.owned()) == (State.FINISHED, FinishReason.ABORT, 0)
    assert d.s.has_work, "the client has not been told"
    retired = d.plan().retired
    assert list(retired) == ([] if when == "waiting" else [request.seq])
    d.commit()
    assert d.ended == {"r": "abort"}
    assert connector.finished == ["r"]
    assert not d.s.has_work


def test_the_end_of_a_request_that_never_ran_can_be_taken_without_a_step() -> None:
    d = Drive(engine_config())
    d.add("r", 10)
    d.s.abort("r")
    (output,) = d.s.take_pending()
    assert (output.request_id, output.token_ids, output.finish_reason) == ("r", (), "abort")
    assert not d.s.has_work


def test_an_executor_hears_of_a_sequence_before_its_first_row_and_of_its_end_after_its_last() -> None:
    d = Drive(engine_config(K=0))
    named: set[int] = set()
    d.add("a", 20, max_tokens=3)
    d.add("b", 20, max_tokens=6)
    retired: list[int] = []
    while d.s.has_work:
        plan = d.plan()
        named |= {n.seq for n in plan.first}
        retired += plan.retired
        assert {r.seq for r in plan.rows} <= named - set(retired)
        assert {u.seq for u in plan.blocks} <= named - set(retired)
        d.commit()
    assert sorted(retired) == sorted(named) == [0, 1]


def test_a_preempted_sequence_gets_its_new_table_whole_and_is_not_introduced_twice() -> None:
    d = Drive(engine_config(K=0))
    d.running("r", 40)
    d.s.preempt("r")
    plan = d.plan()
    assert list(plan.first) == []
    assert [(u.replace, list(u.blocks)) for u in plan.blocks] == [(True, d.requests["r"].tables[0])]
