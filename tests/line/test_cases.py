# SPDX-License-Identifier: Apache-2.0
"""What ranks in step got wrong elsewhere, on real ones: processes behind a server, which share a mixture's experts.

A case is told by what a user sees: tokens, answers, metrics. Whatever must happen has a deadline.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.line.conftest import MAX_NUM_SEQS, Alone, K, Models, command
from tests.line.controlled import Control
from tests.line.test_experts import COMPLETIONS, complete, prompt_of, steps
from tests.server.harness import DEADLINE_S, Reply, Server, running, wait_until

W = 1 + K
SIZE = W * MAX_NUM_SEQS
"""Of the only graph of the server with prompt lookup: four requests."""
UNDER_WAY_S = 0.3
"""For a message that has been sent, to arrive in the inbox of a rank that stands still."""


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Control:
    return Control(tmp_path_factory.mktemp("control"))


def controlled(models: Models, control: Control, **settings: str) -> list[str]:
    """The command line of two ranks with EAGLE-3 drafts whose connector does as it is told."""
    transfer = settings | {
        "kv_connector": "ControlledConnector",
        "kv_connector_module_path": "tests.line.controlled",
        "kv_connector_extra_config": {"folder": str(control.folder)},
    }
    return command(models, "--kv-transfer-config", json.dumps(transfer), "--no-enable-prefix-caching")


@pytest.fixture(scope="module")
def loading(models: Models, control: Control) -> Iterator[Server]:
    with running(controlled(models, control)) as server:
        yield server


@pytest.fixture(scope="module")
def recomputing(models: Models, control: Control) -> Iterator[Server]:
    before = set(control.folder.glob("*.shut"))
    with running(controlled(models, control, kv_load_failure_policy="recompute")) as server:
        yield server
    assert len(set(control.folder.glob("*.shut")) - before) == 2, "worker halves are shut down"


@pytest.fixture(scope="module")
def lookup(models: Models) -> Iterator[Server]:
    """Two ranks with prompt lookup, and one graph."""
    flags = command(models)
    changes: dict[str, Any] = {
        "--speculative-config": {"method": "ngram", "num_speculative_tokens": K},
        "--compilation-config": {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [SIZE]},
    }
    for flag, value in changes.items():
        flags[flags.index(flag) + 1] = json.dumps(value)
    with running(flags) as server:
        yield server


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as clients:
        yield clients


class Counts:
    """What the ranks have counted since this was made, once they sleep and have told."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._before = self._read()

    def _read(self) -> list[dict[str, list[float]]]:
        wait_for_sleep(self._server)
        return [
            {kind: steps(self._server, rank, kind) for kind in ("steps", "dummy_steps")}
            | {"misses": [sum(misses(self._server, rank).values())]}
            | {name: [self._server.metric(name, engine=str(rank))] for name in COUNTED}
            for rank in (0, 1)
        ]

    def gained(self) -> list[dict[str, Any]]:
        """By rank: executed ``steps`` and ``dummy_steps``, eager and FULL; ``misses``; and `COUNTED`."""
        after = self._read()
        for rank in after:
            taken = [sum(pair) for pair in zip(rank["steps"], rank["dummy_steps"], strict=True)]
            assert taken == [sum(pair) for pair in zip(after[0]["steps"], after[0]["dummy_steps"], strict=True)]
        return [
            {name: [a - b for a, b in zip(now[name], then[name], strict=True)] for name in now}
            for now, then in zip(after, self._before, strict=True)
        ]


COUNTED = (
    "paceline:graph_padding_tokens_total",
    "paceline:kv_load_failures_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:iteration_tokens_total_sum",
    "vllm:spec_decode_num_draft_tokens_total",
)


def misses(server: Server, rank: int) -> dict[str, float]:
    """Steps that were not uniform, by reason."""
    found = {}
    for line in server.get("/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("paceline:uniformity_miss_total{") and f'engine="{rank}"' in name:
            found[name.split('reason="')[1].split('"')[0]] = float(value)
    return found


def votes(server: Server) -> list[float]:
    return [server.metric("paceline:barrier_wait_seconds_count", engine=str(rank)) for rank in (0, 1)]


def wait_for_sleep(server: Server) -> None:
    """Wait until the ranks have ceased to vote. Ranks that are awake tell of their votes ten times a second."""

    def asleep() -> bool:
        before = votes(server)
        time.sleep(0.25)
        return before == votes(server) and before[0] == before[1]

    wait_until(asleep, "the group to sleep")
    for rank in ("0", "1"):
        server.wait_metric("vllm:kv_cache_usage_perc", 0, engine=rank)


def ask(server: Server, prompt: Sequence[int], rank: int) -> Reply:
    """A completion that may fail."""
    fields = {"prompt": list(prompt), "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    return server.post(COMPLETIONS, fields, {"X-data-parallel-rank": str(rank)})


def ended(server: Server, reason: str, rank: int) -> float:
    return server.metric("vllm:request_success_total", engine=str(rank), finished_reason=reason)


def test_L4_a_rank_with_nothing_but_a_load_runs_dummies(
    loading: Server, control: Control, clients: ThreadPoolExecutor, alone: Alone
) -> None:
    prompt, busy = list(range(40, 65)), [7, 3]
    assert complete(loading, prompt, 12, 1) == alone(prompt, 12)
    control.say(prompt, "later")
    counts = Counts(loading)
    waiting = clients.submit(complete, loading, prompt, 12, 1)
    loading.wait_metric("vllm:num_requests_waiting", 1, engine="1")
    assert complete(loading, busy, 40, 0) == alone(busy, 40)
    assert not waiting.done()
    # Nobody has rows now; the load ends nevertheless.
    control.release(prompt)
    assert waiting.result(DEADLINE_S) == alone(prompt, 12)
    rank0, rank1 = counts.gained()
    eager, full = rank0["steps"]
    assert (eager, full > 0) == (1, True), "the prefill, and the rest"
    assert rank1["dummy_steps"] == [eager, full]
    assert rank0["dummy_steps"] == rank1["steps"]
    assert rank1["steps"][0] == 0, "padded when its load had ended"
    assert rank1["vllm:external_prefix_cache_hits_total"] == [len(prompt) - 1]


def test_L5_requests_to_a_sleeping_group(experts: Server, clients: ThreadPoolExecutor, alone: Alone) -> None:
    counts = Counts(experts)
    for i in range(20):
        wait_for_sleep(experts)
        prompts = [[i + 1, 2, 3], [4, i + 1]]
        # One of the two alone, or both at once.
        asked = [rank for rank in (0, 1) if i % 4 in (rank, 2, 3)]
        said = {rank: clients.submit(complete, experts, prompts[rank], 4, rank) for rank in asked}
        for rank, answer in said.items():
            assert answer.result(DEADLINE_S) == alone(prompts[rank], 4)
    for rank in counts.gained():
        assert sum(rank["dummy_steps"]) > 0, "woken by the other rank"


def test_L8_however_many_drafts_there_are_the_group_stays_uniform(
    lookup: Server, clients: ThreadPoolExecutor, alone: Alone
) -> None:
    rng = random.Random(3)
    prompts = [[11, 12, 13, 14] * 6, prompt_of(rng), [5] * 9, prompt_of(rng)]
    before = misses(lookup, 0)
    counts = Counts(lookup)
    said = [clients.submit(complete, lookup, prompt, 40, 0) for prompt in prompts]
    for prompt, answer in zip(prompts, said, strict=True):
        assert answer.result(DEADLINE_S) == alone(prompt, 40)
    rank0, rank1 = counts.gained()
    eager, full = rank0["steps"]
    reasons = {reason: n - before.get(reason, 0) for reason, n in misses(lookup, 0).items()}
    assert {reason for reason, n in reasons.items() if n} == {"prefill"}
    assert eager == reasons["prefill"] <= len(prompts) + 1
    [computed], [drafts] = rank0["vllm:iteration_tokens_total_sum"], rank0["vllm:spec_decode_num_draft_tokens_total"]
    verified = (computed - sum(map(len, prompts))) / W
    assert verified > full, "steps of several rows"
    assert 0 < drafts < K * verified, "some found K tokens to copy, some fewer"
    assert rank1["dummy_steps"] == [eager, full]


def test_L9_three_requests_in_a_graph_for_four(lookup: Server, alone: Alone) -> None:
    prompts = [[21, 22], [31, 32, 33], [41]]
    counts = Counts(lookup)
    fields = {"prompt": prompts, "max_tokens": 30, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    reply = lookup.post(COMPLETIONS, fields, {"X-data-parallel-rank": "0"})
    assert reply.status == 200
    said = [tuple(choice["token_ids"]) for choice in reply.json["choices"]]
    assert said == [alone(prompt, 30) for prompt in prompts]
    rank0, rank1 = counts.gained()
    _, full = rank0["steps"]
    [computed] = rank0["vllm:iteration_tokens_total_sum"]
    inert = full * SIZE - (computed - sum(map(len, prompts)))
    assert rank0["paceline:graph_padding_tokens_total"] == [inert]
    assert inert >= full * W, "never more than three"
    assert rank1["paceline:graph_padding_tokens_total"] == [full * SIZE], "dummies are nothing else"


def disturbed(server: Server, control: Control, how: str, failing: int) -> dict[int, list[int]]:
    """A prompt of each rank, whose KV it keeps: the next load on rank ``failing`` fails as ``how`` says, its peer's is
    held until it is released."""
    first = 100 + 10 * failing + len(how)
    prompts = {failing: list(range(first, first + 30)), 1 - failing: list(range(first, first + 20))}
    for rank, prompt in prompts.items():
        complete(server, prompt, 2, rank)
    control.say(prompts[failing], how)
    control.say(prompts[1 - failing], "hold")
    return prompts


@pytest.mark.parametrize(("how", "failing"), [("raise", 0), ("raise", 1), ("lose", 1)])
def test_L11_a_synchronous_load_that_fails_while_the_peer_decodes(
    loading: Server, control: Control, clients: ThreadPoolExecutor, alone: Alone, how: str, failing: int
) -> None:
    prompts = disturbed(loading, control, how, failing)
    errors, counts = ended(loading, "error", failing), Counts(loading)
    peer = clients.submit(complete, loading, prompts[1 - failing], 60, 1 - failing)
    control.wait_held(prompts[1 - failing])
    victim = clients.submit(ask, loading, prompts[failing], failing)
    time.sleep(UNDER_WAY_S)
    control.release(prompts[1 - failing])
    reply = victim.result(DEADLINE_S)
    assert reply.status == 500
    assert "could not be loaded" in reply.error["message"]
    assert how != "raise" or "the other side is gone" in reply.error["message"]
    assert peer.result(DEADLINE_S) == alone(prompts[1 - failing], 60)
    gained = counts.gained()
    assert ended(loading, "error", failing) - errors == 1
    assert gained[failing]["steps"] == [0, 1], "the step of the failed load ran as it was agreed on"
    assert gained[1 - failing]["steps"][0] == 0
    assert gained[0]["misses"] == gained[1]["misses"] == [0]
    assert gained[failing]["paceline:kv_load_failures_total"] == [1]
    control.say(prompts[failing], "bring")
    assert complete(loading, prompts[failing], 20, failing) == alone(prompts[failing], 20)


@pytest.mark.parametrize(("how", "failing"), [("raise", 1), ("lose", 0)])
def test_L11_what_a_synchronous_load_did_not_bring_is_computed_if_that_is_the_policy(
    recomputing: Server, control: Control, clients: ThreadPoolExecutor, alone: Alone, how: str, failing: int
) -> None:
    prompts = disturbed(recomputing, control, how, failing)
    counts = Counts(recomputing)
    peer = clients.submit(complete, recomputing, prompts[1 - failing], 60, 1 - failing)
    control.wait_held(prompts[1 - failing])
    hurt = clients.submit(complete, recomputing, prompts[failing], 20, failing)
    time.sleep(UNDER_WAY_S)
    control.release(prompts[1 - failing])
    assert hurt.result(DEADLINE_S) == alone(prompts[failing], 20)
    assert peer.result(DEADLINE_S) == alone(prompts[1 - failing], 60)
    gained = counts.gained()
    assert gained[failing]["steps"][0] == 1, "the prefill; the step of the failed load ran as it was agreed on"
    assert gained[failing]["paceline:kv_load_failures_total"] == [1]
    assert gained[1 - failing]["paceline:kv_load_failures_total"] == [0]


@pytest.mark.parametrize("rank", [0, 1])
def test_L12_an_abort_between_vote_and_forward(
    loading: Server, control: Control, clients: ThreadPoolExecutor, alone: Alone, rank: int
) -> None:
    prompts = {rank: list(range(140, 170 + rank)), 1 - rank: list(range(180, 200 + rank))}
    for number, prompt in prompts.items():
        complete(loading, prompt, 2, number)
    control.say(prompts[rank], "hold")
    aborts, counts = ended(loading, "abort", rank), Counts(loading)
    leaving = loading.connection()
    body = {"prompt": prompts[rank], "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
    leaving.request("POST", COMPLETIONS, json.dumps(body).encode(), {"X-data-parallel-rank": str(rank)})
    control.wait_held(prompts[rank])
    staying = clients.submit(complete, loading, prompts[1 - rank], 20, 1 - rank)
    leaving.close()
    loading.wait_metric("vllm:request_success_total", aborts + 1, engine=str(rank), finished_reason="abort")
    time.sleep(UNDER_WAY_S)
    control.release(prompts[rank])
    assert staying.result(DEADLINE_S) == alone(prompts[1 - rank], 20)
    gained = counts.gained()
    assert gained[rank]["steps"] == [0, 1], "the step ran as voted, and was the last of the request"
    assert gained[1 - rank]["dummy_steps"] == [0, 1]
    assert gained[rank]["dummy_steps"] == gained[1 - rank]["steps"]
    assert gained[0]["misses"] == gained[1]["misses"] == [0]
    control.say(prompts[rank], "bring")
    assert complete(loading, prompts[rank], 20, rank) == alone(prompts[rank], 20)
