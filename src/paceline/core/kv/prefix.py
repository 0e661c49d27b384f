# SPDX-License-Identifier: Apache-2.0
"""The prefix index: which blocks hold the KV of which chained content hash."""

from __future__ import annotations


class PrefixIndex:
    """Hash to blocks and back. Duplicates are all kept; the oldest registration is the one that is hit.

    A hash with one block, the common case, maps to the block itself; with several, to a dict in order.
    """

    __slots__ = ("_blocks", "hash_of")

    def __init__(self) -> None:
        self._blocks: dict[bytes, int | dict[int, None]] = {}
        self.hash_of: dict[int, bytes] = {}

    def register(self, key: bytes, block: int) -> None:
        """``block`` holds, or will hold when the step in flight ends, the KV of ``key``."""
        self.hash_of[block] = key
        known = self._blocks.setdefault(key, block)
        if known == block:
            return
        if isinstance(known, dict):
            known[block] = None
        else:
            self._blocks[key] = {known: None, block: None}

    def find(self, key: bytes) -> int | None:
        """The oldest block registered under ``key``."""
        found = self._blocks.get(key)
        return next(iter(found)) if isinstance(found, dict) else found

    def drop(self, block: int) -> None:
        """``block`` is reused, or never got its KV."""
        key = self.hash_of.pop(block)
        found = self._blocks[key]
        if isinstance(found, dict):
            del found[block]
            if found:
                return
        del self._blocks[key]

    def __len__(self) -> int:
        return len(self.hash_of)
