# SPDX-License-Identifier: Apache-2.0
"""Decode steps as graphs, recorded on the CPU: what the general path computes, for its own rows and for nobody else.

Everything but the capture itself is what runs on a GPU: `recording` stands in for CUDA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.core.graphs import FULL
from paceline.core.plan import Row
from paceline.execution.attention import RowSpan
from paceline.execution.connector import ConnectorSteps
from paceline.execution.decode_graphs import table_lengths
from paceline.execution.graph_step import Buffers, StepShape
from paceline.execution.rejection import verify
from paceline.models.experts import LocalExchange, Mixture
from paceline.models.llama import Taps
from paceline.parallel.exchange import GroupExchange
from tests.execution.graph_rig import BLOCK, LENGTHS, ROWS, SHAPES, SIZES, STARTS, TAPS, WIDTH, Rig, Watched
from tests.execution.recording import HostRead, Recording, Repeating
from tools.gpu.models import TINY, TINY_MIXTURE, random_model


def assert_near(found: torch.Tensor, expected: torch.Tensor, off: float) -> None:
    """Vectors (of the last dimension) are no farther apart than ``off`` times their length.

    In bfloat16 only half of them need be that near: a rounding may choose another expert.
    """
    difference = (found.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1).clamp_min(1e-6)
    assert (difference.max() if expected.dtype == found.dtype == torch.float32 else difference.median()) < off


@pytest.fixture(scope="module", params=SHAPES)
def shape(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def rig(shape: str) -> Rig:
    return Rig(random_model(SHAPES[shape]))


@pytest.fixture(scope="module")
def dense() -> Rig:
    return Rig(random_model(TINY))


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-3), (torch.bfloat16, 0.08)], ids=["float32", "bfloat16"])
def test_they_compute_what_the_general_path_does(shape: str, dtype: torch.dtype, off: float) -> None:
    """Hidden states, logits, taps and the cache, in every size and for tables of every length."""
    rig = Rig(random_model(SHAPES[shape], dtype))
    for rows, size in (([0, 1, 2, 3], SIZES[1]), ([3, 1], SIZES[0]), ([2], SIZES[1]), ([1, 3, 2], SIZES[1])):
        planned = [rig.row(i) for i in rows]
        batch, expected, tapped = rig.general(planned)
        kept = [layer.clone() for layer in rig.cache.layers]
        computed, taps = rig.step(planned, size)
        assert_near(computed.hidden, expected, off)
        with torch.inference_mode():
            logits = rig.model.logits(expected)
        assert computed.logits is not None
        assert logits.std() > 0.5
        # Logits are float32 whatever they are of.
        assert_near(computed.logits.to(dtype), logits.to(dtype), off)
        for state, reference in zip(taps.states, tapped.states, strict=True):
            assert_near(state, reference, off)
        for layer, before in zip(rig.cache.layers, kept, strict=True):
            assert_near(layer[1:], before[1:], off)
        assert computed.verdicts is not None
        assert all(verdict.finite and verdict.sound for verdict in computed.verdicts)
        assert len(computed.verdicts) == len(batch.rows)


def test_rows_that_are_not_there_write_and_yield_nothing(rig: Rig) -> None:
    """Three requests in a graph for four (L9): only their own slots change, but for block 0, which nobody owns."""
    rig.step([rig.row(i) for i in range(ROWS)])
    for layer in rig.cache.layers:
        layer[1:] += 1.0
    before = [layer.clone() for layer in rig.cache.layers]
    computed, taps = rig.step([rig.row(i) for i in range(3)])
    assert len(computed.hidden) == 3 * WIDTH
    assert computed.verdicts is not None
    assert len(computed.verdicts) == 3
    assert all(len(state) == 3 * WIDTH for state in taps.states)
    own = torch.zeros(100, BLOCK, dtype=torch.bool)
    own[0] = True
    for i in range(3):
        for position in range(STARTS[i], STARTS[i] + WIDTH):
            own[int(rig.tables[i][position // BLOCK]), position % BLOCK] = True
    for layer, kept in zip(rig.cache.layers, before, strict=True):
        changed = (layer != kept).any(-1).any(1).any(1)
        assert not changed[~own].any()
        assert changed[own][4:].all()
        layer[1:] -= 1.0


def test_inert_rows_choose_no_expert() -> None:
    exchange = Watched()
    rig = Rig(random_model(TINY_MIXTURE, exchange=exchange), recorder=Repeating())
    rig.step([rig.row(i) for i in range(3)])
    count = TINY_MIXTURE.experts.num_experts if TINY_MIXTURE.experts else 0
    assert (exchange.chosen[: 3 * WIDTH, :2] < count).all()
    assert (exchange.chosen[3 * WIDTH : ROWS * WIDTH, :2] == count).all()


def test_a_rank_without_rows_replays_with_inert_rows() -> None:
    exchange = Watched()
    rig = Rig(random_model(TINY_MIXTURE, exchange=exchange), recorder=Repeating())
    before, replays = [layer.clone() for layer in rig.cache.layers], rig.replayed.replays
    exchange.chosen.fill_(0)
    with torch.inference_mode():
        rig.graphs.idle(SIZES[1])
    assert rig.replayed.replays == replays + 1
    assert (exchange.chosen[: ROWS * WIDTH, :2] == 4).all()
    assert all(torch.equal(layer[1:], kept[1:]) for layer, kept in zip(rig.cache.layers, before, strict=True))


def test_a_dense_rank_without_rows_has_nothing_to_do(dense: Rig) -> None:
    replays = dense.replayed.replays
    dense.graphs.idle(SIZES[1])
    assert dense.replayed.replays == replays


def test_what_one_step_leaves_behind_does_not_reach_the_next(rig: Rig) -> None:
    """Long tables, then short ones, then none in most rows; the same row yields the same each time."""
    alone, _ = rig.step([rig.row(2)])
    assert alone.logits is not None
    expected = alone.logits.clone()
    for others in ([0, 1], [0, 1, 3], [3], []):
        rows = [rig.row(2), *(rig.row(i, drafts=(200, -1)) for i in others)]
        rig.step([rig.row(i) for i in range(ROWS)])
        computed, _ = rig.step(rows)
        assert computed.logits is not None
        place = rig.batch(rows).indices.index(0) * WIDTH
        torch.testing.assert_close(computed.logits[place : place + WIDTH], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "change",
    ["longer context", "table ends early", "wider row", "no drafts", "a chunk", "more rows", "other size", "taps"],
)
def test_what_was_not_captured_is_left_alone(dense: Rig, change: str) -> None:
    """A block table longer than any captured (S14), and the like: None, and the cache is as it was."""
    rows, size, taps = [dense.row(0), dense.row(1)], SIZES[1], Taps(TAPS)
    tables = list(dense.tables)
    if change == "longer context":
        rows[1] = dense.row(1, start=LENGTHS[-1] * BLOCK - 1)
    elif change == "table ends early":
        dense.tables[1] = tables[1][: STARTS[1] // BLOCK + 1]
        rows[1] = dense.row(1, start=STARTS[1])
    elif change == "wider row":
        rows = [Row(0, STARTS[0], 2 * WIDTH, (1,) * (2 * WIDTH - 1), True)]
    elif change == "no drafts":
        rows = [Row(0, STARTS[0], WIDTH, (), True)]
    elif change == "a chunk":
        rows = [Row(0, STARTS[0], WIDTH, (), False)]
    elif change == "more rows":
        rows, size = [dense.row(i) for i in range(3)], SIZES[0]
    elif change == "other size":
        size = 3 * WIDTH
    else:
        taps = Taps((1,))
    batch = dense.batch([rows[0], dense.row(1)] if change == "table ends early" else rows)
    if change == "table ends early":
        short = next(i for i, span in enumerate(batch.spans) if batch.rows[i].seq == 1)
        batch.spans[short] = RowSpan(STARTS[1], WIDTH, tables[1][: STARTS[1] // BLOCK])
        dense.tables[1] = tables[1]
    before, replays = [layer.clone() for layer in dense.cache.layers], dense.replayed.replays
    with torch.inference_mode():
        assert dense.graphs.forward(batch, size, taps, None) is None
    assert dense.replayed.replays == replays
    assert not taps.states
    assert all(torch.equal(layer, kept) for layer, kept in zip(dense.cache.layers, before, strict=True))


@pytest.mark.parametrize("rates", [None, (0.7, 0.4), (1.0, 1.0)], ids=["standard", "synthetic", "all"])
def test_drafts_are_verified_as_the_general_path_does(rates: tuple[float, ...] | None) -> None:
    """Right, wrong and placeholder drafts in all orders; the same random numbers where rates decide."""
    rig = Rig(random_model(TINY), rates, recorder=Repeating())
    _, hidden, _ = rig.general([rig.row(i) for i in range(ROWS)])
    with torch.inference_mode():
        best = rig.model.logits(hidden).argmax(-1).view(ROWS, WIDTH)
    order = rig.batch([rig.row(i) for i in range(ROWS)]).indices
    seen = set()
    for kinds in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 2), (1, 2)):
        rows = []
        for place, i in enumerate(order):
            right = int(best[place, 0])
            # The second draft is right behind a right first one only by chance: what counts is what `verify` says.
            options = ((right, int(best[place, 1])), ((right + 1) % 256, 3), (-1, -1))
            rows.append(rig.row(i, drafts=(options[kinds[0]][0], options[kinds[1]][1])))
        computed, _ = rig.step(rows)
        batch = rig.batch(rows)
        assert computed.logits is not None
        assert computed.verdicts is not None
        verifications = [
            state.verification(i * WIDTH, row.drafts)
            for i, (state, row) in enumerate(zip(batch.states, batch.rows, strict=True))
        ]
        expected = verify(computed.logits, computed.logits.argmax(-1).tolist(), verifications, rates)
        found = [(*row.drafts[: v.accepted], v.token) for row, v in zip(batch.rows, computed.verdicts, strict=True)]
        assert found == expected
        assert not any(-1 in tokens for tokens in found)
        seen |= {len(tokens) for tokens in found}
    assert seen >= ({1, 3} if rates == (1.0, 1.0) else {1, 2})


def test_numbers_of_a_row_that_is_not_finite_are_told(dense: Rig) -> None:
    block = int(dense.tables[1][0])
    kept = [layer[block].clone() for layer in dense.cache.layers]
    for layer in dense.cache.layers:
        layer[block] = float("nan")
    rows = [dense.row(i) for i in range(3)]
    computed, _ = dense.step(rows)
    assert computed.verdicts is not None
    by_seq = {row.seq: verdict.finite for row, verdict in zip(dense.batch(rows).rows, computed.verdicts, strict=True)}
    assert by_seq == {0: True, 1: False, 2: True}
    for layer, whole in zip(dense.cache.layers, kept, strict=True):
        layer[block] = whole


def test_a_connector_waits_for_all_layers_before_and_stores_them_after() -> None:
    said: list[str] = []

    class Connector:
        def register_kv_caches(self, caches: Any) -> None: ...

        def wait_for_layer_load(self, layer: int) -> None:
            said.append(f"wait {layer}")

        def save_kv_layer(self, layer: int, cache: Any) -> None:
            said.append(f"save {layer}")

    rig = Rig(random_model(TINY), recorder=Repeating())
    connector = ConnectorSteps(Connector(), [rig.cache.layers], BLOCK)  # type: ignore[arg-type]
    replay = rig.replayed.replays
    rig.step([rig.row(0)], connector=connector)
    assert rig.replayed.replays == replay + 1
    assert said == [f"{what} {layer}" for what in ("wait", "save") for layer in range(TINY.num_layers)]


def test_graphs_use_no_memory_but_weights_cache_and_buffers(rig: Rig) -> None:
    """Anything else would have moved, or be stale, when a graph is replayed."""
    model = rig.model
    weights = [
        model.embedding,
        model.head,
        model.final_norm,
        model._rotary,
        *rig.cache.layers,
        rig.cache._heads_on_device,
    ]
    for layer in model.layers:
        parts = [layer.attn_norm, layer.qkv, layer.o, layer.mlp_norm, layer.gate_up, layer.down, layer.qkv_bias]
        parts.append(layer.qk_norms)
        if isinstance(layer.experts, Mixture):
            parts += [layer.experts.router, layer.experts.gate_up, layer.experts.down]
            if layer.experts.shared is not None:
                parts += [layer.experts.shared.gate_up, layer.experts.shared.down, layer.experts.shared.gate]
        weights += [part for part in parts if part is not None]
    rig.recording.known |= {weight.untyped_storage().data_ptr() for weight in weights}
    assert len(rig.recording.captured) == len(SIZES) * len(LENGTHS)
    assert not list(rig.recording.foreign())


def test_a_host_read_cannot_be_recorded() -> None:
    """The general path's mixture asks how many tokens each expert has; in a graph it must not."""
    recording = Recording()
    model = random_model(TINY_MIXTURE)
    mixture = model.layers[0].experts
    assert isinstance(mixture, Mixture)

    def step(buffers: Any) -> None:
        buffers.hidden.copy_(mixture(buffers.hidden))

    buffers = Buffers.make(model, StepShape(2, 1, 4), 0)
    with pytest.raises(HostRead):
        recording(step, buffers)
    mixture.static = True
    recording(step, buffers)


def test_collectives_of_a_captured_step_read_nothing_on_the_host(tmp_path: Path) -> None:
    """All_gather and reduce_scatter in fixed sizes, as NCCL would run them in a graph; here gloo does, on one rank."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        exchange = GroupExchange(gather=True)
        rig = Rig(random_model(TINY_MIXTURE, exchange=exchange), recorder=Repeating())
        rows = [rig.row(i) for i in range(3)]
        _, expected, _ = rig.general(rows)
        computed, _ = rig.step(rows)
        assert_near(computed.hidden, expected, 1e-3)
        with torch.inference_mode():
            rig.graphs.idle(SIZES[0])
    finally:
        dist.destroy_process_group()
    assert rig.replayed.replays == 2


def test_table_lengths_double_up_to_the_longest_row() -> None:
    assert table_lengths(2048, 4, 16) == (16, 32, 64, 128, 129)
    assert table_lengths(100, 4, 16) == (7,)
    assert table_lengths(8192, 1, 16) == (16, 32, 64, 128, 256, 512, 513)


def test_full_is_the_mode_of_captured_steps() -> None:
    """The exchange of a captured step is that of FULL, in the size of the graph."""
    begun: list[tuple[int, int]] = []

    class Noting(LocalExchange):
        def begin(self, mode: int, size: int, inert: torch.Tensor | None = None) -> None:
            begun.append((mode, size))
            super().begin(mode, size, inert)

    Rig(random_model(TINY_MIXTURE, exchange=Noting()), recorder=Repeating())
    assert {terms for terms in begun if terms[1]} == {(FULL, size) for size in SIZES}
