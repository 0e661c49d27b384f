# SPDX-License-Identifier: Apache-2.0
"""Packed weights that the general path and compiled steps share: held once, read by both."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.models.fused import Packed, PackedLinear
from paceline.models.kernels import Array

Arrays = tuple[Array, Array, Array]
"""See `Packed.arrays`."""


class _Joined(Packed):
    """Packed weights of equal shape, copied together as if they were the layers of one."""

    def __init__(self, parts: Sequence[Packed], out: int, size: int) -> None:
        super().__init__(len(parts), out, size, int8=True)
        for i, part in enumerate(parts):
            self._words[i], self._start[i], self._scale[i] = part._words[0], part._start[0], part._scale[0]


class _Part(Packed):
    """One of the weights that are joined in ``whole``."""

    def __init__(self, whole: _Joined, index: int) -> None:
        self.whole = whole
        self._each = whole._each
        self.groups, self.width = whole.groups, whole.width
        at = slice(index, index + 1)
        self._words, self._start, self._scale = whole._words[at], whole._start[at], whole._scale[at]


class SharedLinear(PackedLinear):
    """A weight in int8 whose packed form others may read."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight, int8=True)
        self.shape = tuple(weight.shape)

    @property
    def arrays(self) -> Arrays:
        """See `Packed.arrays`; of a single layer."""
        return self._packed.arrays

    @staticmethod
    def join(weights: Sequence[SharedLinear]) -> Arrays:
        """``weights``, at least one and of equal shape, as the layers of one; from now on each is a part of that."""
        if len(weights) == 1:
            return weights[0].arrays
        first = weights[0]._packed
        if isinstance(first, _Part) and len(first.whole.arrays[0]) == len(weights):
            return first.whole.arrays
        whole = _Joined([weight._packed for weight in weights], *weights[0].shape)
        for i, weight in enumerate(weights):
            weight._packed = _Part(whole, i)
        return whole.arrays
