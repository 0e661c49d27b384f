# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts on one rank: the logits of transformers, inert rows, own experts only, clear refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.core.graphs import NONE
from paceline.models.experts import LocalExchange, Mixture, Placement, Routed
from paceline.models.registry import load_model
from paceline.models.spec import UnsupportedModel
from tests.parallel.mixtures import FAMILIES, reference_logits, save_mixture

IDS = [(7 * i * i + 3) % 256 for i in range(90)]
Logits = Callable[..., torch.Tensor]


class OneOf(LocalExchange):
    """Rank ``rank`` of ``ranks``, as far as loading goes."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks


def mixtures(folder: Path, **options: Any) -> list[Mixture]:
    layers = load_model(folder, "float32", **options).model.layers
    return [layer.experts for layer in layers if isinstance(layer.experts, Mixture)]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mixtral", {}),
        ("mixtral", {"num_experts_per_tok": 1, "tie_word_embeddings": True}),
        ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3}),
        ("qwen2_moe", {}),
        ("qwen2_moe", {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [0, 2]}),
        ("qwen2_moe", {"qkv_bias": False}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": []}),
    ],
)
def test_logits_equal_transformers(tmp_path: Path, logits: Logits, family: str, changes: dict[str, Any]) -> None:
    expected = reference_logits(save_mixture(tmp_path, family, **changes), IDS)
    assert expected.std() > 0.5  # flat logits would agree with anything
    torch.testing.assert_close(logits(load_model(tmp_path, "float32").model, IDS), expected, atol=1e-4, rtol=0)


def test_the_number_of_experts_is_read_under_either_name(tmp_path: Path, logits: Logits) -> None:
    save_mixture(tmp_path, "qwen3_moe")
    before = logits(load_model(tmp_path, "float32").model, IDS)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    raw["num_experts"] = raw.pop("num_local_experts")
    path.write_text(json.dumps(raw))
    assert torch.equal(logits(load_model(tmp_path, "float32").model, IDS), before)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("options", "off"), [({"dtype": "bfloat16"}, 0.06), ({"quantization": "int8"}, 0.12)], ids=["bfloat16", "int8"]
)
def test_fewer_bits_are_close_to_transformers(
    tmp_path: Path, logits: Logits, family: str, options: dict[str, str], off: float
) -> None:
    expected = reference_logits(save_mixture(tmp_path, family), IDS)
    loaded = load_model(tmp_path, **options).model
    assert (loaded.dtype, loaded.quantization) == (torch.bfloat16, options.get("quantization"))
    differences = (logits(loaded, IDS) - expected).abs() / expected.std()
    # Where a token's best experts lie close together, rounding may choose another; so not the mean.
    assert 0 < differences.median() < off


def test_inert_rows_choose_no_expert_and_leave_others_as_they_are(tmp_path: Path) -> None:
    save_mixture(tmp_path, "mixtral")
    exchange = LocalExchange()
    mixture = mixtures(tmp_path, parallel=exchange)[0]
    hidden = torch.randn(6, 48)
    alone = mixture(hidden)
    exchange.begin(NONE, 0, torch.tensor([False, True, False, True, True, False]))
    beside = mixture(hidden)
    torch.testing.assert_close(beside[[0, 2, 5]], alone[[0, 2, 5]])
    assert not beside[[1, 3, 4]].any()
    exchange.begin(NONE, 0)
    torch.testing.assert_close(mixture(hidden), alone)


def test_a_row_that_is_not_finite_spreads_to_no_other(tmp_path: Path) -> None:
    save_mixture(tmp_path, "qwen2_moe")
    mixture = mixtures(tmp_path)[0]
    hidden = torch.randn(4, 48)
    alone = mixture(hidden)
    hidden[1] = torch.nan
    got = mixture(hidden)
    torch.testing.assert_close(got[[0, 2, 3]], alone[[0, 2, 3]])


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_computation_without_host_reads_gives_the_same_sums(tmp_path: Path, family: str, ranks: int) -> None:
    save_mixture(tmp_path, family)
    total = torch.zeros(11, 48)
    for rank in range(ranks):
        mixture = mixtures(tmp_path, parallel=OneOf(rank, ranks))[0]
        torch.manual_seed(1)
        hidden = torch.randn(11, 48)
        experts, weights = mixture.route(hidden)
        experts[4:6] = mixture.config.num_experts
        routed = Routed(hidden, experts, weights)
        grouped = mixture.compute_grouped(routed)
        torch.testing.assert_close(mixture.compute_static(routed), grouped, atol=1e-5, rtol=1e-5)
        assert not grouped[4:6].any()
        total += grouped
    torch.testing.assert_close(total, mixtures(tmp_path)[0].compute_grouped(routed), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("experts", "ranks"), [(4, 1), (4, 2), (4, 4), (5, 2), (7, 4), (3, 4), (128, 16)])
def test_every_expert_is_held_by_one_rank(experts: int, ranks: int) -> None:
    placement = Placement(experts, ranks)
    held = [list(placement.experts(rank)) for rank in range(ranks)]
    assert [e for run in held for e in run] == list(range(experts))
    sizes = [len(run) for run in held]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_reads_its_own_experts_only(tmp_path: Path, family: str) -> None:
    save_mixture(tmp_path, family)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    whole = mixtures(tmp_path)
    count = whole[0].config.num_experts
    for rank, own in enumerate(Placement(count, 2).experts(r) for r in range(2)):
        mine = {n: w for n, w in weights.items() if ".experts." not in n or int(n.split(".experts.")[1][0]) in own}
        assert len(mine) < len(weights)
        save_file(mine, path)
        part = mixtures(tmp_path, parallel=OneOf(rank, 2))
        assert torch.equal(part[-1].gate_up, whole[-1].gate_up[own.start : own.stop])
        assert torch.equal(part[-1].down, whole[-1].down[own.start : own.stop])
        with pytest.raises(UnsupportedModel, match=r"the weights lack model\.layers\.\d\..*experts\.\d"):
            load_model(tmp_path, "float32", parallel=OneOf(1 - rank, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 must be at least 1 and at most the 4 experts"),
        ({"intermediate_size": 48}, r"w1\.weight|experts.0.gate_proj.weight: the configuration asks for shape"),
        ({"num_local_experts": 3}, r"weights without a place in a Llama model: .*experts\.3\."),
        ({"num_local_experts": 5}, r"shape \(5, 48\), found \(4, 48\)"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
    ],
)
def test_what_the_weights_contradict_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_mixture(tmp_path, "mixtral")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UnsupportedModel, match=message):
        load_model(tmp_path, "float32")
