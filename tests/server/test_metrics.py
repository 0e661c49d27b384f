# SPDX-License-Identifier: Apache-2.0
"""What Prometheus scrapes, and the small endpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline import __version__
from paceline.core.plan import TransferEvent
from paceline.engine.messages import ModelInfo, Snapshot
from paceline.server.metrics import Metrics
from tests.core.driving import Drive, Offers, engine_config
from tests.server.fake import VOCAB
from tests.server.harness import Server, fake_server

DASHBOARD = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:num_preemptions",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:request_success",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos",
)


def test_names_that_dashboards_read(server: Server) -> None:
    families = {family.name: family for family in text_string_to_metric_families(server.get("/metrics").text)}
    for name in DASHBOARD:
        assert name in families
    labelled = {s.labels.get("model_name") for name in DASHBOARD for s in families[name].samples}
    assert labelled == {"fake"}


def test_counts_of_a_few_requests() -> None:
    with fake_server(names=["served", "alias"]) as server:
        assert server.complete("a" * 40, max_tokens=5)["model"] == "served"
        assert server.complete("a" * 40, max_tokens=5, model="alias")["model"] == "alias"
        server.complete("a" * 40, max_tokens=5, n=2, stop="aa")
        expected = {
            "vllm:prompt_tokens_total": 160,
            "vllm:request_success_total{length}": 2,
            "vllm:request_success_total{stop}": 2,
            "vllm:time_to_first_token_seconds_count": 4,
            "vllm:request_queue_time_seconds_count": 4,
            "vllm:request_generation_tokens_count": 4,
            "vllm:request_params_n_count": 3,
            "vllm:prefix_cache_queries_total": 160,
            "vllm:prefix_cache_hits_total": 96,
        }
        for name, value in expected.items():
            plain, _, reason = name.rstrip("}").partition("{")
            labels = {"finished_reason": reason} if reason else {}
            server.wait_metric(plain, value, model_name="served", **labels)


def test_accepted_drafts_are_counted_by_position(drafting: Server) -> None:
    drafting.wait_metric("vllm:num_requests_running", 0)
    counted = {"drafts": 2, "draft_tokens": 6, "accepted_tokens": 6}
    before = {name: drafting.metric(f"vllm:spec_decode_num_{name}_total") for name in counted}
    positions = [
        drafting.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=position) for position in "012"
    ]
    drafting.complete("abcd", max_tokens=9)
    # One token of the prefill, then two verifications of three drafts, all accepted.
    for name, count in counted.items():
        drafting.wait_metric(f"vllm:spec_decode_num_{name}_total", before[name] + count)
    for position, count in zip("012", positions, strict=True):
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        assert drafting.metric(name, position=position) == count + 2


def test_transfers_that_went_wrong_are_counted() -> None:
    """A load past its deadline, then the report that it has ended after all, then the same report again."""
    connector = Offers({"frozen": 8}, asynchronous=True)
    d = Drive(engine_config(K=0, transfer_deadline_s=0.05, block_size=4), connector)
    request = d.add("frozen", 10)
    d.step()
    d.now += 1.0
    d.step()
    s = d.s

    def samples() -> dict[str, float]:
        metrics = Metrics("m", ModelInfo("m", "", 10, 100))
        metrics.snapshots = lambda: [Snapshot.of(s.stats, s.num_running, s.num_waiting, 0.0, s.num_quarantined_blocks)]
        families = text_string_to_metric_families(metrics.text().decode())
        return {sample.name: sample.value for family in families for sample in family.samples}

    names = ("paceline:kv_load_failures_total", "paceline:late_transfers_total", "paceline:quarantined_blocks")
    assert [samples()[name] for name in names] == [1, 0, 2]
    for _ in range(2):
        s.end_transfers([TransferEvent("loaded", request.seq, 0)])
    assert [samples()[name] for name in names] == [1, 1, 0]


def test_the_graph_mode_is_told(server: Server) -> None:
    assert server.metric("paceline:graph_config_info", cudagraph_mode="NONE") == 1


def test_salted_prompts_share_no_cache(server: Server) -> None:
    def hits(**fields: str) -> float:
        before = server.metric("vllm:prefix_cache_hits_total")
        server.complete("salted " * 10, max_tokens=1, **fields)
        server.wait_metric("vllm:num_requests_running", 0)
        return server.metric("vllm:prefix_cache_hits_total") - before

    hits()
    assert hits() > 0
    assert hits(cache_salt="mine") == 0
    assert hits(cache_salt="mine") > 0


def test_idle_engine_takes_no_processor_time(server: Server) -> None:
    server.complete("a", max_tokens=50)
    server.wait_metric("vllm:num_requests_running", 0)

    def ticks() -> int:
        fields = Path(f"/proc/{server.engine_pid()}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    before = ticks()
    for _ in range(200):
        assert server.get("/health").status == 200
    assert ticks() - before <= 1


def test_models(server: Server) -> None:
    listed = server.get("/v1/models").json
    assert listed["object"] == "list"
    [card] = listed["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", 2048)
    assert card["vocab_size"] == VOCAB
    assert server.get("/v1/models/fake").json == card


def test_tokenize_and_back(server: Server) -> None:
    text = "héllo 😀"
    found = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json
    assert found["tokens"] == list(text.encode())
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 2048
    assert found["token_strs"][0] == "h"
    # A byte that is no character has a name of its own.
    assert found["token_strs"][1] == "bytes:\\xc3"
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json == {"prompt": text}


def test_tokenize_conversation(server: Server) -> None:
    found = server.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json
    assert bytes(found["tokens"]).decode() == "user: hi\nassistant: "


@pytest.mark.parametrize("fields", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}])
def test_tokenize_needs_one_of_prompt_and_messages(server: Server, fields: dict[str, object]) -> None:
    assert server.post("/tokenize", fields).error["param"] == "prompt"


def test_detokenize_refuses_ids_outside_the_vocabulary(server: Server) -> None:
    assert server.post("/detokenize", {"tokens": [1, 999]}).error["param"] == "tokens"


def test_version_and_health(server: Server) -> None:
    assert server.get("/version").json == {"version": __version__}
    assert server.get("/health").status == server.get("/ping").status == server.post("/ping", {}).status == 200


def test_description_resolves_and_names_every_path(server: Server) -> None:
    document = server.get("/openapi.json").json
    assert document["openapi"].startswith("3.1")
    schemas = document["components"]["schemas"]
    references = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert references <= set(schemas)
    for path, operations in document["paths"].items():
        for method in operations:
            reply = server.ask(method.upper(), path.replace("{name}", "fake"), b"{}" if method == "post" else None)
            assert reply.status in (200, 400)
    assert schemas["CompletionRequest"]["required"] == ["prompt"]
    assert schemas["CompletionRequest"]["additionalProperties"] is False
