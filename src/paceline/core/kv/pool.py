# SPDX-License-Identifier: Apache-2.0
"""Who owns which KV block, and which free block is reused first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from paceline.core.kv.prefix import PrefixIndex

NULL_BLOCK = 0
"""Stands in a table where a group needs no block; never allocated, never freed."""


class BlockPool:
    """Blocks 1 .. num_blocks - 1, each either owned (by one or more) or free.

    Free blocks without a hash are reused before hashed ones, and hashed ones in the order in which they were
    freed, so what can still be hit lives longest::

        take <- [ plain (a stack) ][ cached, oldest first ]
        release: no hash -> plain, hash -> end of cached

    Owners beyond the first are counted only for blocks that have them: a block that nobody shares costs no
    bookkeeping, so blocks are taken and released in runs.
    """

    __slots__ = ("_cached", "_more_owners", "_plain", "index", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.index = PrefixIndex()
        self._plain = list(range(num_blocks - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._more_owners: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._plain) + len(self._cached)

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    def is_free_hit(self, block: int) -> bool:
        """Whether a hashed block has no owner at present."""
        return block in self._cached

    def take(self, count: int) -> list[int] | None:
        """``count`` blocks for a first owner, or None (and nothing taken) when fewer are free."""
        plain = self._plain
        if count <= len(plain):
            if count == 1:
                return [plain.pop()]
            if count <= 0:
                return []
            blocks = plain[-count:]
            blocks.reverse()
            del plain[-count:]
            return blocks
        if count > len(plain) + len(self._cached):
            return None
        blocks = plain[::-1]
        plain.clear()
        drop, oldest = self.index.drop, self._cached.popitem
        for _ in range(count - len(blocks)):
            block, _ = oldest(last=False)
            drop(block)
            blocks.append(block)
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """One more owner for each of ``blocks`` (prefix hits and transfers); null blocks are skipped."""
        cached, more = self._cached, self._more_owners
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if block in cached:
                del cached[block]
            else:
                more[block] = more.get(block, 0) + 1

    def release(self, table: Sequence[int]) -> None:
        """One owner less for each of ``table``, tail first, so that a chain is evicted from its end. No null blocks."""
        more, hashed = self._more_owners, self.index.hash_of
        if not more and not hashed:
            self._plain += table[::-1]
            return
        for block in reversed(table):
            if block in more:
                if more[block] == 1:
                    del more[block]
                else:
                    more[block] -= 1
            elif block in hashed:
                self._cached[block] = None
            else:
                self._plain.append(block)

    def forget(self, blocks: Iterable[int]) -> None:
        """Drop the hashes of blocks whose KV will not be computed, free or not."""
        for block in blocks:
            if block in self.index.hash_of:
                self.index.drop(block)
                if block in self._cached:
                    del self._cached[block]
                    self._plain.append(block)

    def owners(self) -> dict[int, int]:
        """Owner count of every block that is not free (for checks; walks the pool)."""
        free = set(self._plain) | set(self._cached)
        return {b: 1 + self._more_owners.get(b, 0) for b in range(1, self.num_blocks) if b not in free}
