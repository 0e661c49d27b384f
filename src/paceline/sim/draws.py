# SPDX-License-Identifier: Apache-2.0
"""Seeded random numbers, drawn in blocks: one at a time they would cost more than the scheduling."""

from __future__ import annotations

from collections.abc import Iterator

from numpy.random import Generator

BLOCK = 4096


class Uniforms:
    """Uniform numbers in [0, 1). ``next`` is a bound method of the stream: call it, do not rebind it."""

    __slots__ = ("next",)

    def __init__(self, rng: Generator) -> None:
        self.next = _stream(rng).__next__


def _stream(rng: Generator) -> Iterator[float]:
    while True:
        yield from rng.random(BLOCK).tolist()
