# SPDX-License-Identifier: Apache-2.0
"""Decode graphs: which token counts are captured, and which capture a step replays."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.config import EngineConfig

NONE, FULL = 0, 1
"""How a step runs: eagerly, or by replaying the captured graph of a whole decode step."""

DEFAULT_CAPTURE_SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))


def capture_sizes(sizes: Sequence[int] | None, width: int, max_num_seqs: int) -> tuple[int, ...]:
    """Captured token counts: rounded up to multiples of W, and the largest possible decode step always among them.

    >>> capture_sizes([1, 2, 4, 8, 16, 32, 64], 7, 6)
    (7, 14, 21, 35, 42)
    """
    largest = width * max_num_seqs
    rounded = {-(-size // width) * width for size in sizes or DEFAULT_CAPTURE_SIZES}
    return tuple(sorted({size for size in rounded if size <= largest} | {largest}))


class GraphDispatcher:
    """Finds the graph for a step in constant time."""

    __slots__ = ("_padded", "enabled", "sizes", "width")

    def __init__(self, config: EngineConfig) -> None:
        self.width = config.speculation.width
        self.enabled = config.graphs.mode == "FULL_DECODE_ONLY"
        self.sizes = capture_sizes(config.graphs.capture_sizes, self.width, config.scheduler.max_num_seqs)
        self._padded = [0] * (self.sizes[-1] + 1)
        for size in reversed(self.sizes):
            self._padded[: size + 1] = [size] * (size + 1)

    def size_for(self, tokens: int) -> int:
        """The smallest captured size of at least ``tokens`` tokens, 0 if none is."""
        return self._padded[tokens] if tokens < len(self._padded) else 0

    def mode_for(self, tokens: int, width: int) -> int:
        """FULL iff graphs are on, all rows are decode rows of W tokens, and a capture is large enough."""
        if self.enabled and width == self.width and self.size_for(tokens):
            return FULL
        return NONE
