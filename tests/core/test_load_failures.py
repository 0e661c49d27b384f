# SPDX-License-Identifier: Apache-2.0
"""Cases T4 and T5: KV that did not arrive costs the requests that need it, and nobody else."""

from __future__ import annotations

import pytest

from paceline.core.config import GroupConfig
from paceline.core.plan import TransferEvent

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


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_T4_a_synchronous_load_that_fails_is_an_error_of_its_row(policy: str) -> None:
    d = ToyDrive(engine_config(load_failure_policy=policy), Offers({"hurt": 48}))
    d.add("well", 50, max_tokens=12)
    d.step()
    hurt = d.add("hurt", 60, max_tokens=10)
    d.plan()
    assert d.rows()["hurt"].start == 48
    event = TransferEvent("loaded", hurt.seq, 0, error="lost", failed_blocks=(hurt.tables[0][1],))
    d.fill(hurt, 16)
    d.commit(errors={"hurt": "lost"}, transfers=[event])
    assert d.s.stats.load_failures == 1
    assert d.s.stats.late_transfers == 0
    if policy == "fail":
        assert d.ended == {"hurt": "error"}
    else:
        assert d.step()["hurt"].start == 16
    d.run()
    assert d.ended["well"] == "length"
    assert d.ended["hurt"] == ("error" if policy == "fail" else "length")
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
def test_T5_whoever_shares_a_rejected_load_waits_for_the_recomputation(sharers: int, policy: str) -> None:
    prompt = range(60)
    d = ToyDrive(engine_config(K=0, load_failure_policy=policy), Offers({"first": 48}))
    first = d.add("first", prompt, max_tokens=10)
    names = [f"sharer{i}" for i in range(sharers)]
    for name in names:
        d.add(name, prompt, max_tokens=10)
    d.plan()
    assert [row.start for row in d.rows().values()] == [48] * (1 + sharers), "hits of blocks planned in this pass"
    event = TransferEvent("loaded", first.seq, 0, error="lost", failed_blocks=tuple(first.tables[0][:3]))
    d.toy.blind = True  # every row reads what was never loaded: none of their tokens may reach a client
    d.commit(errors={"first": "lost"}, transfers=[event])
    d.toy.blind = False
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
