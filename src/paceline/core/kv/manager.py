# SPDX-License-Identifier: Apache-2.0
"""Block tables: one per request and cache group, what they need, what they can hit, what they give back."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paceline.core.config import CacheConfig, GroupConfig
from paceline.core.kv.pool import NULL_BLOCK, BlockPool
from paceline.core.plan import BlockUpdate
from paceline.core.request import Request

NEVER = 1 << 60
"""A token count that no request reaches: hashing is off."""


class Hit(msgspec.Struct, frozen=True):
    """A local prefix hit: the blocks of each group, null where the group needs none, and the tokens covered."""

    tokens: int
    tables: tuple[list[int], ...]


class KVManager:
    """Allocates, hashes and frees the blocks of requests in all cache groups of one rank.

    Groups share one pool. A *full* group keeps every block. A *sliding* group keeps the blocks that hold any of
    the last ``sliding_window`` tokens before the next one. A *recurrent* group keeps the block with the state
    of the last computed token; a block inside a chunk gets no state, hence no memory. Only full groups can go back to
    an earlier token (`can_rewind`).
    """

    def __init__(self, config: CacheConfig, max_model_len: int, width: int = 1, lookahead: int = 0) -> None:
        self.block_size = config.block_size
        self.caching = config.enable_prefix_caching
        self.groups = config.groups
        self.max_model_len = max_model_len
        self._reach = width + lookahead
        self._last_start = max_model_len - width - 1
        self.pool = BlockPool(config.num_blocks)
        self.has_recurrent = any(g.kind == "recurrent" for g in config.groups)
        self.can_rewind = all(g.kind == "full" for g in config.groups)
        self._one_full = len(config.groups) == 1 and config.groups[0].kind == "full"
        self._no_hit = Hit(0, tuple([] for _ in config.groups))
        self._planned_now: set[bytes] = set()

    # -- what a request can hit and needs ------------------------------------------------------------------

    def lookup(self, request: Request, *, drop_last: bool = False) -> Hit:
        """The longest local hit: at most floor((num_tokens - 1) / block_size) blocks, outputs included.

        ``drop_last``: one block less than could be hit, for a drafter that needs the hidden states of the last one.
        """
        if not self.caching:
            return self._no_hit
        most = (request.num_tokens - 1) // self.block_size
        if most <= 0:
            return self._no_hit
        if self._one_full:
            blocks = self._chain(request, most, 0)
            if drop_last and blocks:
                blocks.pop()
            return Hit(len(blocks) * self.block_size, (blocks,)) if blocks else self._no_hit
        hit = self._agree_on_hit(request, most)
        if drop_last and hit.tokens:
            hit = self._agree_on_hit(request, hit.tokens // self.block_size - 1)
        return hit

    def _chain(self, request: Request, most: int, group: int) -> list[int]:
        """Blocks of a full group from the start up to the first that is not cached."""
        find, blocks = self.pool.index.find, []
        for i in range(most):
            block = find(self._key(request, i, group))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _key(self, request: Request, index: int, group: int) -> bytes:
        hashes = request.hashes
        if len(hashes) <= index:
            hashes = request.block_hashes(index + 1, self.block_size)
        return hashes[index] if group == 0 else hashes[index] + group.to_bytes(2, "little")

    def _agree_on_hit(self, request: Request, most: int) -> Hit:
        """The longest prefix that every group can serve; a group can only shorten what another offers."""
        length = most
        while length > 0:
            tables = [self._group_hit(request, length, g, i) for i, g in enumerate(self.groups)]
            shortest = min(len(t) for t in tables)
            if shortest == length:
                return Hit(length * self.block_size, tuple(tables))
            length = shortest
        return self._no_hit

    def _group_hit(self, request: Request, most: int, group: GroupConfig, index: int) -> list[int]:
        if group.kind == "full":
            return self._chain(request, most, index)
        for length in range(most, 0, -1):
            first = self._first_live(group, length * self.block_size)
            found = [self._find_live(request, i, index) for i in range(first, length)]
            if None not in found:
                return [NULL_BLOCK] * first + [b for b in found if b is not None]
        return []

    def _find_live(self, request: Request, index: int, group: int) -> int | None:
        key = self._key(request, index, group)
        if self.groups[group].kind == "recurrent" and key in self._planned_now:
            return None  # the state exists only after this step
        return self.pool.index.find(key)

    def _first_live(self, group: GroupConfig, computed: int) -> int:
        """Index of the first block that a group still needs once ``computed`` tokens are in the cache."""
        if group.kind == "full" or computed == 0:
            return 0
        window = group.sliding_window if group.kind == "sliding" else 2
        return max(0, computed - window + 1) // self.block_size

    def blocks_for(self, tokens: int) -> int:
        """Blocks of one group that hold ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    def needed(self, request: Request, slots: int, hit: Hit | None = None) -> int:
        """Free blocks that it takes for ``request`` to hold ``slots`` tokens in every group, beyond what it holds.

        With a hit: its blocks are not allocated, but those without an owner leave the free list.
        """
        total = self.blocks_for(slots)
        need = 0
        for g in range(len(self.groups)):
            held = len(request.tables[g]) if request.tables else 0
            if hit is None:
                need += max(0, total - held)
                continue
            table = hit.tables[g]
            need += max(0, total - len(table) - held) + sum(map(self.pool.is_free_hit, table))
        return need

    # -- changes -------------------------------------------------------------------------------------------

    def admit(self, request: Request, hit: Hit) -> None:
        """Give ``request`` its tables, beginning with the hit blocks, which gain an owner."""
        for table in hit.tables:
            self.pool.touch(table)
        request.tables = [list(table) for table in hit.tables]
        request.capacity = hit.tokens
        request.local_tokens = hit.tokens
        request.hashed = hit.tokens // self.block_size
        self._settle(request)

    def grow(self, request: Request, slots: int, updates: list[BlockUpdate] | None, states_from: int = 1) -> bool:
        """Make every table hold ``slots`` tokens; False, and nothing taken, when the pool cannot.

        ``states_from``: the first token count whose recurrent state must have a place (the end of a chunk; a decode
        row may end anywhere).
        """
        slots = min(slots, self.max_model_len)
        if slots <= request.capacity:
            return True
        if self._one_full:
            table = request.tables[0]
            count = len(table)
            total = (slots - 1) // self.block_size + 1
            blocks = self.pool.take(total - count)
            if blocks is None:
                return False
            table += blocks
            request.capacity = total * self.block_size
            self._settle(request)
            if updates is not None:
                updates.append(BlockUpdate(request.seq, 0, False, blocks))
            return True
        return self._grow_groups(request, slots, updates, states_from)

    def _grow_groups(self, request: Request, slots: int, updates: list[BlockUpdate] | None, states_from: int) -> bool:
        self._drop_dead(request)
        total = self.blocks_for(slots)
        first_state = (states_from - 1) // self.block_size
        wanted = [
            [group.kind != "recurrent" or i >= first_state for i in range(len(table), total)]
            for group, table in zip(self.groups, request.tables, strict=True)
        ]
        blocks = self.pool.take(sum(map(sum, wanted)))
        if blocks is None:
            return False
        supply = iter(blocks)
        for g, (table, flags) in enumerate(zip(request.tables, wanted, strict=True)):
            added = [next(supply) if flag else NULL_BLOCK for flag in flags]
            table += added
            if updates is not None and added:
                updates.append(BlockUpdate(request.seq, g, False, added))
        request.capacity = total * self.block_size
        self._settle(request)
        return True

    def _drop_dead(self, request: Request) -> None:
        """Return the blocks that no later token of ``request`` attends to, unless a transfer reads them."""
        if request.fences:
            return
        for group, table in zip(self.groups, request.tables, strict=True):
            if group.kind == "full":
                continue
            first = min(self._first_live(group, request.computed), len(table))
            dead = [i for i in range(first) if table[i] != NULL_BLOCK]
            self.pool.release([table[i] for i in dead])
            for i in dead:
                table[i] = NULL_BLOCK

    def hash_planned(self, request: Request, tokens: int) -> None:
        """Register the full blocks among the first ``tokens`` tokens that are not registered yet."""
        full = tokens // self.block_size
        if not self.caching or full <= request.hashed:
            return
        if self._one_full:  # its blocks from ``hashed`` on have no hash yet
            hashes, table, register = request.hashes, request.tables[0], self.pool.index.register
            if len(hashes) < full:
                request.block_hashes(full, self.block_size)
            for i in range(request.hashed, full):
                register(hashes[i], table[i])
            request.hashed = full
            self._settle(request)
            return
        for g, table in enumerate(request.tables):
            for i in range(request.hashed, full):
                if table[i] != NULL_BLOCK and (self.groups[g].kind != "recurrent" or self._keeps_state(request, i)):
                    self._register(request, i, g)
        request.hashed = full
        self._settle(request)

    def _keeps_state(self, request: Request, index: int) -> bool:
        """Whether the row in flight ends on the boundary behind block ``index``: only then is that state kept."""
        return request.computed == (index + 1) * self.block_size

    def _register(self, request: Request, index: int, group: int) -> None:
        block = request.tables[group][index]
        if block not in self.pool.index.hash_of:
            key = self._key(request, index, group)
            self.pool.index.register(key, block)
            if self.groups[group].kind == "recurrent":
                self._planned_now.add(key)

    def unhash_from(self, request: Request, first: int) -> list[int]:
        """Drop the hashes of ``request``'s blocks from index ``first`` on; returns those blocks."""
        blocks = [b for table in request.tables for b in table[first : request.hashed] if b != NULL_BLOCK]
        self.pool.forget(blocks)
        request.hashed = min(request.hashed, first)
        self._settle(request)
        return blocks

    def _settle(self, request: Request) -> None:
        """Work out up to which start a decode row of full width needs no block, fills none, and fits."""
        request.hash_at = hash_at = (request.hashed + 1) * self.block_size if self.caching else NEVER
        clear = request.capacity - self._reach + 1
        if hash_at <= clear:
            clear = hash_at - 1
        request.clear_until = clear if clear <= self._last_start else self._last_start + 1

    def release(self, request: Request) -> None:
        """Take back all blocks of ``request`` (tail first)."""
        self.release_tables(request.tables)
        self.clear(request)

    def release_tables(self, tables: Sequence[list[int]]) -> None:
        """Take back whole block tables, one per group."""
        for group, table in zip(self.groups, tables, strict=False):
            self.pool.release(table if group.kind == "full" else [b for b in table if b != NULL_BLOCK])

    def clear(self, request: Request) -> None:
        """Forget the tables without freeing them: somebody else answers for the blocks now."""
        request.tables = []
        request.capacity = 0
        request.hashed = 0
        request.hash_at = NEVER
        request.clear_until = 0

    def end_pass(self) -> None:
        """The states planned in this pass exist from now on."""
        if self._planned_now:
            self._planned_now.clear()

    def replace_updates(self, request: Request) -> Sequence[BlockUpdate]:
        """The whole tables, for an executor that does not know them."""
        return [BlockUpdate(request.seq, g, True, tuple(t)) for g, t in enumerate(request.tables)]
