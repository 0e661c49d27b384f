# SPDX-License-Identifier: Apache-2.0
"""Cases T4 and T5: KV that did not arrive costs the requests that need it, and nobody else."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.config import GroupConfig
from paceline.core.plan import TransferEvent
from paceline.core.request import Request

from .driving import Offers, engine_config
from .toy_model import ToyDrive

FULL = GroupConfig()


@pytest.mark.parametrize("K", [0, 3])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_T4_policy_fail_ends_only_the_request_whose_blocks_failed(bad: int, K: int) -> None:
    connector = Offers({"good": 48, "hurt": 48}, asynchronous=True)
    d = ToyDrive(engine_config(K=K), connector)
    for name in ("hurt", "good"):
        d.add(name, 60, max_tokens=10)
    d.step()
    hurt = d.requests["hurt"]
    failed = TransferEvent("loaded", hurt.seq, 0, error="checksum", failed_blocks=(hurt.tables[0][bad],))
    d.plan()
    d.commit(transfers=[failed, d.arrives("good", 48)])
    assert d.ended == {"hurt": "error"}
    assert "checksum" in d.errors["hurt"]
    assert d.s.stats.load_failures == 1
    assert connector.finished == ["hurt"]
    d.run()
    assert d.ended["good"] == "length"
    d.assert_right()
    assert d.owned() == 0


@pytest.mark.parametrize("K", [0, 3])
@pytest.mark.parametrize("local", [0, 16])
@pytest.mark.parametrize("bad", [1, 2, None])
def test_T4_policy_recompute_computes_from_the_first_bad_block(bad: int | None, local: int, K: int) -> None:
    connector = Offers({"hurt": 48}, asynchronous=True)
    d = ToyDrive(engine_config(K=K, load_failure_policy="recompute"), connector)
    prompt = range(60)
    if local:
        d.add("earlier", prompt[: local + 1], max_tokens=1)
        d.run()
    hurt = d.add("hurt", prompt, max_tokens=10)
    d.step()
    failed = () if bad is None else (hurt.tables[0][bad], hurt.tables[0][2])
    d.fill(hurt, 16 * (bad or 0))
    d.plan()
    d.commit(transfers=[TransferEvent("loaded", hurt.seq, 0, error="lost", failed_blocks=failed)])
    row = d.step()["hurt"]
    assert row.start == (local if bad is None else 16 * bad), "no block named: all that was to be loaded is bad"
    d.run()
    assert d.ended["hurt"] == "length"
    assert connector.asked.count("hurt") == 1, "the same load is not tried again"
    d.assert_right()


def told(how: str, request: Request, bad: int | None) -> dict[str, Any]:
    """A synchronous load failed and left block ``bad`` (None: nobody knows which) of ``request`` without KV.

    ``how``: as the end of its transfer, with the row's error, or both.
    """
    blocks = () if bad is None else (request.tables[0][bad],)
    event = TransferEvent("loaded", request.seq, request.generation, error="lost", failed_blocks=blocks)
    return {
        "errors": {request.id: "lost"},
        "failed_loads": {} if how == "event" else {request.id: blocks},
        "transfers": [] if how == "row" else [event],
    }


HOW = ["event", "row", "both"]


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("bad", [1, None])
@pytest.mark.parametrize("K", [0, 3])
def test_T4_a_synchronous_load_that_fails_is_an_error_of_its_row(
    K: int, bad: int | None, how: str, policy: str
) -> None:
    connector = Offers({"hurt": 48})
    d = ToyDrive(engine_config(K=K, load_failure_policy=policy), connector)
    d.add("well", 50, max_tokens=12)
    d.step()
    hurt = d.add("hurt", 60, max_tokens=10)
    d.plan()
    assert d.rows()["hurt"].start == 48
    d.fill(hurt, 16 * (bad or 0))
    d.commit(**told(how, hurt, bad))
    assert d.s.stats.load_failures == 1
    assert d.s.stats.late_transfers == 0
    assert d.tokens["hurt"] == []
    if policy == "fail":
        assert d.ended == {"hurt": "error"}
    else:
        assert d.step()["hurt"].start == 16 * (bad or 0)
    d.run()
    assert d.ended["well"] == "length"
    assert d.ended["hurt"] == ("error" if policy == "fail" else "length")
    assert connector.asked.count("hurt") == 1, "the same load is not tried again"
    d.assert_right()
    assert d.owned() == 0


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, GroupConfig(kind="recurrent"))])
@pytest.mark.parametrize("K", [0, 3])
def test_a_row_that_is_suspected_and_loads_nothing_runs_again(
    K: int, groups: tuple[GroupConfig, ...], policy: str
) -> None:
    """An exception names no request: all rows that join with computed tokens are suspected, hits of the cache too."""
    prompt = range(33)
    d = ToyDrive(engine_config(K=K, groups=groups, load_failure_policy=policy), Offers({"hurt": 48}))
    d.add("earlier", prompt, max_tokens=1)
    d.run()
    hit = d.add("hit", prompt, max_tokens=10)
    d.add("hurt", 60, max_tokens=10)
    d.plan()
    assert {name: row.start for name, row in d.rows().items()} == {"hit": 32, "hurt": 48}
    d.commit(errors={"hit": "lost", "hurt": "lost"}, failed_loads={"hit": (), "hurt": ()})
    assert d.s.stats.load_failures == 1
    assert d.step()["hit"].start == 32
    assert hit.ask
    d.run()
    assert d.ended["hit"] == "length"
    assert d.ended["hurt"] == ("error" if policy == "fail" else "length")
    d.assert_right()
    assert d.owned() == 0


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_blocks_that_turn_out_bad_once_they_were_hit_are_hit_by_nobody_again(policy: str) -> None:
    """A load that is told too late: who made it has ended, and who relies on it has loaded nothing."""
    prompt = range(60)
    d = ToyDrive(engine_config(K=0, load_failure_policy=policy), Offers({"first": 48}))
    first = d.add("first", prompt, max_tokens=1)
    d.plan()
    d.fill(first, 32)
    d.toy.blind = True
    d.commit()
    second = d.add("second", prompt, max_tokens=10)
    d.plan()
    assert d.rows()["second"].start == 48
    d.commit(errors={"second": "lost"}, failed_loads={"second": (second.tables[0][2],)})
    d.toy.blind = False
    d.add("third", prompt, max_tokens=10)
    d.run()
    assert d.ended == {"first": "length", "second": "error" if policy == "fail" else "length", "third": "length"}
    d.assert_right()
    assert d.owned() == 0


def test_T4_a_synchronous_load_that_names_no_bad_block_leaves_the_local_prefix_and_its_sharers_alone() -> None:
    d = ToyDrive(engine_config(load_failure_policy="recompute"), Offers({"hurt": 48}))
    d.running("well", range(33))
    hurt = d.add("hurt", [*range(32), *range(900, 930)], max_tokens=5)
    d.plan()
    assert d.rows()["hurt"].start == 48
    d.commit(errors={"hurt": "lost"}, transfers=[TransferEvent("loaded", hurt.seq, 0, error="lost")])
    assert d.requests["well"].num_preemptions == 0
    assert d.step()["hurt"].start == 32
    d.run()
    d.assert_right()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("sharers", [1, 2])
@pytest.mark.parametrize("how", ["event", "row", "all"])
def test_T5_whoever_shares_a_rejected_load_waits_for_the_recomputation(how: str, sharers: int, policy: str) -> None:
    """``how`` the load is told: as an event, with the error of its row, or with the errors of all that joined."""
    prompt = range(60)
    d = ToyDrive(engine_config(K=0, load_failure_policy=policy), Offers({"first": 48}))
    first = d.add("first", prompt, max_tokens=10)
    names = [f"sharer{i}" for i in range(sharers)]
    for name in names:
        d.add(name, prompt, max_tokens=10)
    d.plan()
    assert [row.start for row in d.rows().values()] == [48] * (1 + sharers), "hits of blocks planned in this pass"
    blocks = tuple(first.tables[0][:3])
    event = TransferEvent("loaded", first.seq, 0, error="lost", failed_blocks=blocks)
    suspects = ["first", *names] if how == "all" else ["first"]
    lost = {} if how == "event" else dict.fromkeys(suspects, () if how == "all" else blocks)
    d.toy.blind = True  # every row reads what was never loaded: none of their tokens may reach a client
    errors = dict.fromkeys(suspects, "lost")
    d.commit(errors=errors, failed_loads=lost, transfers=[event] if how == "event" else [])
    d.toy.blind = False
    assert d.s.stats.load_failures == 1
    assert all(not tokens for tokens in d.tokens.values())
    assert [r.id for r in d.s.waiting] == names, "those that start over keep their order"
    d.run()
    assert d.ended == {"first": "error" if policy == "fail" else "length"} | dict.fromkeys(names, "length")
    d.assert_right()
    assert d.owned() == 0


@pytest.mark.parametrize("groups", [(FULL,), (FULL, GroupConfig(kind="sliding", sliding_window=16))])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("at_once", [True, False])
def test_T5_a_load_on_top_of_hit_blocks_that_turn_out_bad_is_computed_from_there(
    at_once: bool, policy: str, groups: tuple[GroupConfig, ...]
) -> None:
    """The loader hit blocks planned in the pass in which their row failed; a window keeps no blocks before them."""
    d = ToyDrive(
        engine_config(K=0, threshold=32, groups=groups, load_failure_policy=policy),
        Offers({"loader": 90}, asynchronous=True),
    )
    d.running("other", 10)
    d.add("bad", range(100))
    d.step()
    d.add("loader", [*range(70), *range(900, 940)], max_tokens=5)
    d.plan()
    assert d.rows()["bad"].start == 32
    assert d.requests["loader"].computed == 64
    d.toy.blind = True
    d.commit(errors={"bad": "poisoned"}, transfers=[d.arrives("loader", 90)] if at_once else [])
    d.toy.blind = False
    while not d.tokens["loader"]:  # whether it computes from the bad block on or loads anew
        d.plan()
        under_way = [r.id for r in d.s.holding if r.loading is not None and r.loading.arrived is None]
        d.commit(transfers=[d.arrives(name, 90) for name in under_way])
    d.s.abort("other")
    d.run()
    assert d.ended["loader"] == "length"
    d.assert_right()
    assert d.owned() == 0
