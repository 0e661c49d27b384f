# SPDX-License-Identifier: Apache-2.0
"""Passes of a dense EAGLE-3 head in int8 on CPUs, each one compiled call: from embeddings and states to drafts' logits.

Every pass goes through it, whatever its shape: one that is no larger than a decode step's takes buffers that were made
once, a larger one (of prompts) makes its own. So what is drafted behind a sequence does not depend, bit for bit, on
the kind of the step, nor on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.models import decoder, paged
from paceline.models.codegen import INT8, PANEL, kernel
from paceline.models.eagle3 import Eagle3, GatedMLP
from paceline.models.kernels import FLAGS, Array, add_and_norm, encode, encode_rows, normalise
from paceline.models.paged import PagedRows
from paceline.models.products import multiply
from paceline.models.static_kernels import gate_row
from paceline.models.static_weights import SharedLinear
from paceline.models.team import each_row, shared_team

PASS_PHASES = 12

_NONE = tuple(np.empty(shape, dtype=np.float32) for shape in ((1, 0), (1, 2, 0), (0, 0, 0)))
"""Bias, and norms of heads, which a head has not; and taps, of which it fills none."""


@kernel(inline="always", fastmath=FLAGS)
def _enter_row(t: Any, args: Any) -> None:
    """Encode the norms of an embedding and of a state, side by side; ``x``: what the layer adds to."""
    embedded, hidden, nothing, norms, eps, normed_residual, x, row, words, groups, scale = args
    size = x.shape[1]
    add_and_norm(embedded, nothing, t, norms[0], eps, row)
    add_and_norm(hidden, nothing, t, norms[1], eps, row[size:])
    for j in range(size):
        x[t, j] = row[size + j] if normed_residual else hidden[t, j]
    scale[t] = encode(INT8, row, 2 * size, words, t * groups, groups)


@kernel(inline="always", fastmath=FLAGS)
def _encode_gated_row(t: Any, args: Any) -> None:
    both, inner, row, words, groups, scale = args
    gate_row(both, t, inner, row)
    scale[t] = encode(INT8, row, inner, words, t * groups, groups)


@kernel(inline="always", fastmath=FLAGS)
def _leave_row(i: Any, args: Any) -> None:
    """Keep the state of the ``i``-th chosen row, and encode its norm."""
    x, y, chosen, hidden, nothing, norms, eps, row, words, groups, scale = args
    size = x.shape[1]
    for j in range(size):
        hidden[i, j] = x[chosen[i], j] + y[chosen[i], j]
    add_and_norm(hidden, nothing, i, norms[3], eps, row)
    scale[i] = encode(INT8, row, size, words, i * groups, groups)


@kernel()
def run_pass(
    counts: Array,
    eps: float,
    heads: int,
    inner: int,
    normed_residual: bool,
    norms: Array,
    none: Any,
    weights: Any,
    embedded: Array,
    rows: Any,
    at: Any,
    chosen: Array,
    logits: Array,
) -> None:
    """The head's layer, and its logits after some rows: PASS_PHASES.

    Args:
        counts: the counters of as many phases.
        eps: of the norms.
        heads: of the queries.
        inner: the inner width of the MLP.
        normed_residual: see `Eagle3Config.norm_before_residual`.
        norms: of embeddings, of states, of the MLP and of the output, [4, hidden].
        none: a bias, norms of heads and taps, all without entries.
        weights: of queries, keys and values; of attention's output; of gate above up; of down; of the output: as
            `products.multiply` takes them.
        embedded: of the tokens behind the positions, float32 [tokens, hidden].
        rows: by token, float32 unless said otherwise: states, of which the first become those of the chosen rows;
            zeros as wide; x, the residual stream; a product's part of it; a product's queries, keys and values; queries
            (int32, as `paged.attend` takes them); attention's output; the products of gate and up; encoded rows (int32,
            flat); their scales; cosines; sines.
        at: `paged.PagedRows.arrays`.
        chosen: rows whose states are kept and whose logits are computed, rising, int64.
        logits: theirs, [chosen, width], width a multiple of PANEL.
    """
    qkv_weight, o, gate_up, down, output = weights
    hidden, nothing, x, y, qkv, queries, attended, both, words, scale, cos, sin = rows
    bias, head_norms, taps = none
    count, size = x.shape
    row = np.empty(max(2 * size, attended.shape[1], inner), np.float32)
    groups = qkv_weight[0].shape[2]
    enter = embedded, hidden, nothing, norms, eps, normed_residual, x, row, words, groups, scale
    each_row(counts, 0, count, _enter_row, enter)
    multiply(counts, 1, INT8, count, words, qkv_weight, 0, scale, qkv)
    paged.place(counts, 2, qkv, bias, head_norms, 0, eps, cos, sin, at, heads, queries.view(np.uint16))
    paged.attend(counts, 3, at, 0, heads, queries, attended)
    encode_rows(counts, 4, INT8, attended, row, words, o[0].shape[2], scale)
    multiply(counts, 5, INT8, count, words, o, 0, scale, y)
    normalise(counts, 6, INT8, x, y, norms, 2, eps, row, words, gate_up[0].shape[2], scale, taps, -1)
    multiply(counts, 7, INT8, count, words, gate_up, 0, scale, both)
    each_row(counts, 8, count, _encode_gated_row, (both, inner, row, words, down[0].shape[2], scale))
    multiply(counts, 9, INT8, count, words, down, 0, scale, y)
    leave = x, y, chosen, hidden, nothing, norms, eps, row, words, output[0].shape[2], scale
    each_row(counts, 10, chosen.shape[0], _leave_row, leave)
    multiply(counts, 11, INT8, chosen.shape[0], words, output, 0, scale, logits)


class StaticEagle3:
    """Runs passes of a head. States stay in its buffers from pass to pass, so a step's passes follow one another."""

    def __init__(self, model: Eagle3, cache: Array, width: int, max_rows: int) -> None:
        """``cache``: the head's KV, as `paged.PagedRows` describes it. Passes of up to ``max_rows`` rows of up to
        ``width`` tokens each find their buffers made. `supports` must hold."""
        mlp = model.mlp
        assert isinstance(mlp, GatedMLP)
        self._model, self._cache, self._most = model, cache, width * max_rows
        self._team = shared_team()
        weights = (model.qkv, model.o, mlp.gate_up, mlp.down, model.head)
        self._weights = tuple(weight.arrays for weight in weights if isinstance(weight, SharedLinear))
        assert isinstance(model.fc, SharedLinear)
        self._fc = model.fc.arrays
        self._inner = model.config.intermediate_size
        self._norms = torch.stack(model.norms).numpy()
        self._targets = None if model.targets is None else model.targets.numpy()
        self._vocabulary = model.draft_vocab_size
        self._planned: dict[int, tuple[Array, ...]] = {}
        self._pool = self._buffers(self._most)
        self._logits = np.empty((max_rows, self._weights[4][0].shape[1] * PANEL), dtype=np.float32)
        self._rows = self._pool

    @staticmethod
    def supports(model: Eagle3) -> bool:
        """Whether it is dense, in int8, and has an output of its own."""
        return isinstance(model.mlp, GatedMLP) and all(isinstance(w, SharedLinear) for w in (model.qkv, model.head))

    def fuse(self, states: Sequence[Tensor], index: Array) -> None:
        """Begin with the target's hidden states [tokens, target_hidden_size] of each tap, at the places ``index``."""
        rows = self._rows = self._of(len(index))
        hidden, y, words, scale = rows[0], rows[3], rows[8], rows[9]
        tapped = np.concatenate([state.numpy()[index] for state in states], 1)
        self._team.run(decoder.project, 2, INT8, tapped, words, self._fc, scale, y)
        hidden[:] = y[:, : hidden.shape[1]]

    def keep(self, index: Sequence[int]) -> None:
        """Go on with some of the rows that were chosen in the last pass, rising; the next pass has a token of each."""
        hidden = self._rows[0]
        rows = self._rows = self._of(len(index))
        if len(index) < len(hidden) or hidden is not rows[0]:
            rows[0][:] = hidden[index]

    def run(self, tokens: Array, rows: Sequence[tuple[int, int, Array]], chosen: Array) -> list[int]:
        """A pass over the states that `fuse` or `keep` left: the likeliest next tokens after the ``chosen`` ones.

        Args:
            tokens: at each place the token behind the position, int64, of the target's vocabulary.
            rows: as `paged.PagedRows.of` takes them; places of the batch are their tokens, one row after the other.
            chosen: places in rising order, int64, ``max_rows`` at most. Their states are what the next pass may `keep`.
        """
        model, c = self._model, self._model.config
        at = PagedRows.of(self._cache, rows)
        positions = np.concatenate([np.arange(start, start + n) for start, n, _ in rows])
        angles = torch.from_numpy(positions).to(torch.float32)[:, None] * model.rotary
        cos, sin = self._rows[10:]
        torch.cos(angles, out=torch.from_numpy(cos))
        torch.sin(angles, out=torch.from_numpy(sin))
        embedded = model.embed(torch.from_numpy(tokens)).float().numpy()
        if len(chosen) > len(self._logits):
            raise ValueError(f"{len(chosen)} rows want drafts, and {len(self._logits)} are planned for")
        logits = self._logits[: len(chosen)]
        shape = c.rms_norm_eps, c.num_heads, self._inner, model.norm_before_residual
        given = self._norms, _NONE, self._weights, embedded, self._rows, at.arrays
        self._team.run(run_pass, PASS_PHASES, *shape, *given, chosen, logits)
        best = logits[:, : self._vocabulary].argmax(1)
        ids: list[int] = (best if self._targets is None else self._targets[best]).tolist()
        return ids

    def _of(self, count: int) -> tuple[Array, ...]:
        """What `run_pass` calls ``rows``, for ``count`` tokens."""
        if count > self._most:
            return self._buffers(count)
        if count not in self._planned:
            self._planned[count] = self._views(count)
        return self._planned[count]

    def _shapes(self, count: int) -> list[tuple[Any, tuple[int, ...]]]:
        c = self._model.config
        half = c.head_dim // 2
        qkv, o, gate_up, down, _ = (weight[0].shape[1] * PANEL for weight in self._weights)
        fc = self._fc[0].shape[1] * PANEL
        groups = max(weight[0].shape[2] for weight in (*self._weights, self._fc))
        floats: list[tuple[int, ...]] = [(count, c.hidden_size)] * 3 + [(count, max(o, down, fc)), (count, qkv)]
        rest: list[tuple[int, ...]] = [(count, c.num_heads * c.head_dim), (count, gate_up)]
        return [
            *((np.float32, shape) for shape in floats),
            (np.int32, (c.num_kv_heads, count, c.num_heads // c.num_kv_heads, half)),
            *((np.float32, shape) for shape in rest),
            (np.int32, (count * groups,)),
            *((np.float32, shape) for shape in ((count,), (count, half), (count, half))),
        ]

    def _buffers(self, count: int) -> tuple[Array, ...]:
        return tuple(np.zeros(shape, dtype=dtype) for dtype, shape in self._shapes(count))

    def _views(self, count: int) -> tuple[Array, ...]:
        """The beginnings of the planned buffers, in the shapes of ``count`` tokens."""
        shapes = zip(self._pool, self._shapes(count), strict=True)
        return tuple(whole.reshape(-1)[: int(np.prod(shape))].reshape(shape) for whole, (_, shape) in shapes)
