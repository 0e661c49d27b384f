# SPDX-License-Identifier: Apache-2.0
"""What an executor remembers of a sequence between steps: its tokens, its blocks, how it is sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from paceline.core.plan import PLACEHOLDER, BlockUpdate, NewSequence
from paceline.execution.kvcache import Array
from paceline.execution.penalties import Adjustments
from paceline.execution.rejection import Verification
from paceline.execution.sampler import Filters, derived_seed


class PlanMismatch(RuntimeError):
    """A plan contradicts what the executor knows of its sequences: a fault of the scheduler."""


class SequenceState:
    """Tokens (prompt, then what was sampled) and block table, in arrays that grow by doubling.

    The executor keeps its own copy of the tokens, so that a sequence that was preempted is computed again without
    anything but positions crossing the seam.
    """

    __slots__ = (
        "_blocks",
        "_num_blocks",
        "_num_tokens",
        "_tokens",
        "adjustments",
        "filters",
        "num_logprobs",
        "num_prompt",
        "seed",
        "seq",
        "temperature",
    )

    def __init__(self, new: NewSequence, executor_seed: int) -> None:
        self.seq = new.seq
        self.num_prompt = new.source.length
        self.temperature = new.params.temperature
        self.adjustments = Adjustments.of(new.params, new.stop_ids)
        self.filters = Filters.of(new.params)
        self.num_logprobs = new.params.logprobs
        seed = new.params.seed
        self.seed = derived_seed(executor_seed, new.seq) if seed is None else seed
        self._tokens = np.array(new.source.tokens(0, self.num_prompt), dtype=np.int64)
        self._num_tokens = self.num_prompt
        self._blocks = np.empty(0, dtype=np.int64)
        self._num_blocks = 0

    @property
    def plain(self) -> bool:
        """Greedy, by the logits as they are, and nobody asks how likely its tokens were."""
        return self.temperature == 0.0 and self.adjustments is None and self.num_logprobs is None

    @property
    def tokens(self) -> Array:
        """All known tokens, int64; a view."""
        return self._tokens[: self._num_tokens]

    @property
    def num_output(self) -> int:
        return self._num_tokens - self.num_prompt

    @property
    def table(self) -> Array:
        """The block table, int64; a view."""
        return self._blocks[: self._num_blocks]

    def append(self, tokens: Sequence[int]) -> None:
        self._tokens = _appended(self._tokens, self._num_tokens, tokens)
        self._num_tokens += len(tokens)

    def update_blocks(self, update: BlockUpdate) -> None:
        if update.replace:
            self._num_blocks = 0
        self._blocks = _appended(self._blocks, self._num_blocks, update.blocks)
        self._num_blocks += len(update.blocks)

    def inputs(self, start: int, n: int, drafts: Sequence[int], samples: bool, block_size: int) -> Array:
        """Ids at positions [start, start + n): known tokens, then drafts, a placeholder among them as id 0.

        A row that samples reaches the last known token: what stands behind it here was sampled but never committed
        (the scheduler made the sequence start over in that very step) and is forgotten.

        Raises:
            PlanMismatch: the positions are not known, or no blocks were assigned to them.
        """
        known_end = start + n - len(drafts)
        if not start < known_end <= self._num_tokens:
            raise PlanMismatch(f"sequence {self.seq}: positions [{start}, {known_end}) of {self._num_tokens} tokens")
        if start + n > self._num_blocks * block_size:
            raise PlanMismatch(
                f"sequence {self.seq}: positions up to {start + n} in {self._num_blocks} blocks of {block_size} tokens"
            )
        if samples:
            self._num_tokens = known_end
        known = self._tokens[start:known_end]
        if not drafts:
            return known
        # What a placeholder computes is never used: it is rejected, and its position is written again.
        return np.concatenate((known, np.maximum(np.array(drafts, dtype=np.int64), 0)))

    def verification(self, first: int, drafts: tuple[int, ...]) -> Verification:
        """How its row is verified whose logits begin at row ``first`` of those of the batch."""
        return Verification(first, drafts, self.temperature, self.seed, self.num_output, filters=self.filters)


def adjusted(logits: Tensor, rows: Sequence[Verification], states: Sequence[SequenceState]) -> Tensor:
    """``logits`` [positions, vocabulary] with the adjustments of each row's sequence; a copy if there are any.

    Position j of a row counts the drafts before it as output: each position is what it would be if tokens were
    appended one at a time. Positions behind a placeholder are never used and are left alone.
    """
    changes = [(row, state) for row, state in zip(rows, states, strict=True) if state.adjustments is not None]
    if not changes:
        return logits
    logits = logits.clone()
    for row, state in changes:
        assert state.adjustments is not None
        drafts = row.drafts[: row.drafts.index(PLACEHOLDER)] if PLACEHOLDER in row.drafts else row.drafts
        tokens = np.concatenate((state.tokens, np.array(drafts, dtype=np.int64)))
        known = len(tokens) - len(drafts)
        for j in range(len(drafts) + 1):
            state.adjustments.apply(
                logits[row.first + j], tokens[: state.num_prompt], tokens[state.num_prompt : known + j]
            )
    return logits


def _appended(array: Array, used: int, values: Sequence[int]) -> Array:
    """``array`` with ``values`` after its first ``used`` entries, reallocated if they do not fit."""
    needed = used + len(values)
    if needed > len(array):
        grown = np.empty(max(needed, 2 * len(array), 16), dtype=np.int64)
        grown[:used] = array[:used]
        array = grown
    array[used:needed] = values
    return array
