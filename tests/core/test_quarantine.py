# SPDX-License-Identifier: Apache-2.0
"""What a transfer that went wrong may cost: its own blocks, and nobody else's."""

from __future__ import annotations

import pytest

from paceline.core.config import GroupConfig
from paceline.core.plan import TransferEvent

from .driving import Drive, Offers, engine_config
from .toy_model import ToyDrive


def frozen(**settings: object) -> tuple[Drive, Offers]:
    connector = Offers({}, asynchronous=True)
    d = Drive(engine_config(K=0, transfer_deadline_s=0.05, block_size=4, **settings), connector)  # type: ignore[arg-type]
    return d, connector


def test_only_what_a_frozen_load_may_write_is_quarantined() -> None:
    """Two loads behind one local prefix of ten blocks: the prefix stays in use, and is counted once at most."""
    d, connector = frozen(num_blocks=25, mml=64)
    prefix = range(41)
    d.add("earlier", prefix, max_tokens=1)
    d.run()
    for name in ("one", "two"):
        connector.prefix[name] = 44
        d.add(name, [*prefix[:40], *range(900 + len(name), 906)], max_tokens=2)
    d.step()
    assert len(d.s.holding) == 2
    d.now += 1.0
    d.step()
    assert d.ended["one"] == d.ended["two"] == "error"
    assert d.s.transfers.num_quarantined_blocks == d.owned() == 2
    d.add("short", 8, max_tokens=2)
    d.run()
    assert d.ended["short"] == "length"


def test_a_request_that_just_fits_beside_the_quarantine_runs() -> None:
    """It never grows past max_model_len, whatever its verifier width adds."""
    d, connector = frozen(num_blocks=19, mml=64)
    connector.prefix["frozen"] = 8
    d.add("frozen", 10, max_tokens=2)
    d.step()
    d.now += 1.0
    d.step()
    assert d.s.transfers.num_quarantined_blocks == 2
    d.add("long", 40, max_tokens=100)
    d.run()
    assert d.ended == {"frozen": "error", "long": "length"}


def test_bad_blocks_spread_from_sharer_to_sharer() -> None:
    """A window hits only the last blocks: C shares nothing with A, whose row failed, but all with B, which does."""
    d = ToyDrive(engine_config(K=0, block_size=4, groups=(GroupConfig(kind="sliding", sliding_window=16),)))
    prompt = range(41)
    d.add("a", prompt[:9], max_tokens=3)
    d.add("b", prompt, max_tokens=3)
    d.add("c", [*prompt[:40], 900], max_tokens=3)
    d.plan()
    d.toy.blind = True
    d.commit(errors={"a": "poisoned"})
    d.toy.blind = False
    assert not d.tokens["b"]
    assert not d.tokens["c"]
    d.run()
    assert d.ended == {"a": "error", "b": "length", "c": "length"}
    d.assert_right()


def test_a_failed_load_that_names_foreign_blocks_is_bad_as_a_whole() -> None:
    d = ToyDrive(engine_config(K=0, load_failure_policy="recompute"), Offers({"r": 32}, asynchronous=True))
    request = d.add("r", 40, max_tokens=3)
    d.step()
    d.plan()
    d.commit(transfers=[TransferEvent("loaded", request.seq, 0, error="lost", failed_blocks=(99,))])
    assert d.step()["r"].start == 0
    d.run()
    d.assert_right()


@pytest.mark.parametrize("offer", [64, 41, 40])
def test_an_offer_beyond_the_prompt_is_cut_to_it(offer: int) -> None:
    d = ToyDrive(engine_config(K=0), Offers({"r": offer}, asynchronous=True))
    request = d.add("r", 40, max_tokens=3)
    d.step()
    d.plan()
    d.commit(transfers=[d.arrives("r", 40)])
    assert d.step()["r"].start == 39
    assert request.hashed == 2
    d.run()
    d.assert_right()


def test_what_arrives_never_falls_below_the_local_hit() -> None:
    d = ToyDrive(engine_config(K=0), Offers({"r": 48}, asynchronous=True))
    d.add("earlier", range(33), max_tokens=1)
    d.run()
    request = d.add("r", range(60), max_tokens=3)
    d.step()
    d.plan()
    d.commit(transfers=[TransferEvent("loaded", request.seq, 0, tokens=5)])
    assert d.step()["r"].start == 32
    d.run()
    d.assert_right()


def test_nothing_is_held_for_a_request_without_blocks() -> None:
    connector = Offers({"r": 32}, later=["r"])
    connector.reads_after_finish = {"r"}
    d = Drive(engine_config(K=0), connector)
    d.add("r", 40)
    d.step()
    d.s.abort("r")
    d.step()
    assert not d.s.transfers.held
    assert not d.s.has_work


def test_only_a_running_request_can_be_fenced() -> None:
    d = Drive(engine_config(K=0), Offers({"r": 32}, asynchronous=True))
    d.add("r", 40)
    d.step()
    for name in ("r", "nobody"):
        with pytest.raises(ValueError, match=f"request_id: {name} is not running"):
            d.s.fence(name)


def test_a_fence_past_its_deadline_costs_nobody_else_his_work() -> None:
    """The fenced request is the last of the list, but its blocks would go to quarantine, not to the one that grows."""
    d = Drive(engine_config(K=0, num_blocks=10, mml=64, block_size=8, transfer_deadline_s=0.05))
    for name in ("one", "two", "fenced"):
        d.add(name, 14, max_tokens=30)
    d.step()
    d.s.fence("fenced")
    d.now += 1.0
    d.run(lambda: d.s.stats.preemptions > 0)
    assert d.requests["fenced"].num_preemptions == 0


def test_the_answer_of_the_connector_reaches_the_output() -> None:
    class Answers(Offers):
        def request_finished(self, request, blocks):  # type: ignore[no-untyped-def]
            super().request_finished(request, blocks)
            return False, {"remote_block_ids": list(blocks[0]), "computed": request.computed}

    d = Drive(engine_config(K=3), Answers({}))
    d.add("r", 10, max_tokens=2)
    plan = d.plan()
    assert plan is not None
    outputs = d.commit()
    while not any(o.finish_reason for o in outputs):
        d.plan()
        outputs = d.commit()
    [last] = [o for o in outputs if o.finish_reason]
    assert last.kv_transfer_params is not None
    assert last.kv_transfer_params["computed"] <= 12
