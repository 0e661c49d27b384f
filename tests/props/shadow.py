# SPDX-License-Identifier: Apache-2.0
"""A KV cache that remembers, slot by slot, of which tokens it holds the KV, and an executor that fills it.

KV of a position depends on all tokens up to it, so its content is named by a hash chained over them: two sequences
with one beginning have equal content there, and a prefix hit on it is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet

from paceline.core.config import EngineConfig, GroupConfig
from paceline.core.kv.pool import NULL_BLOCK
from paceline.core.plan import PLACEHOLDER, Row, StepPlan

GARBAGE = -1
"""Content that no sequence needs (a chained hash is never -1)."""

Cell = tuple[int, int]
"""(block, slot)."""


class Wrong(AssertionError):
    """The scheduler broke an invariant."""


def require(condition: object, message: str) -> None:
    if not condition:
        raise Wrong(message)


class Text:
    """Token ids of a sequence and the content of each position."""

    __slots__ = ("chain", "ids")

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self.ids: list[int] = []
        self.chain: list[int] = []
        self.extend(list(ids))

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, ids: Sequence[int]) -> None:
        self.chain += self.continued(len(self.ids), ids)
        self.ids += ids

    def cut(self, length: int) -> None:
        del self.ids[length:]
        del self.chain[length:]

    def continued(self, start: int, ids: Sequence[int]) -> list[int]:
        """The content of ``ids`` at positions from ``start`` on; garbage from the first placeholder on."""
        value, chain = self.chain[start - 1] if start else 0, []
        for token in ids:
            value = hash((value, token)) if token != PLACEHOLDER and value != GARBAGE else GARBAGE
            chain.append(value)
        return chain


class ShadowKV:
    """Content of every slot of every block, and the cache group whose layers it belongs to.

    A block of a recurrent group has one state, kept in slot 0: that after the last token of a row that counts.
    """

    def __init__(self, num_blocks: int, block_size: int, groups: Sequence[GroupConfig]) -> None:
        self.block_size = block_size
        self.groups = groups
        self.cells = [[GARBAGE] * block_size for _ in range(num_blocks)]
        self.group_of = [0] * num_blocks

    def erase(self, block: int) -> None:
        self.cells[block] = [GARBAGE] * self.block_size

    def write(self, group: int, table: Sequence[int], start: int, contents: Sequence[int], name: str) -> list[Cell]:
        """Store the content of positions from ``start`` on; returns the cells written."""
        size, written = self.block_size, []
        end = start + len(contents)
        require(end <= len(table) * size, f"{name}: positions up to {end} in {len(table)} blocks of {size}")
        if not contents:
            return []
        if self.groups[group].kind == "recurrent":
            block = table[(end - 1) // size]
            self._enter(group, block, name)[0] = contents[-1]
            return [(block, 0)]
        for i in range(start // size, -(-end // size)):
            first, stop = max(start, i * size), min(end, (i + 1) * size)
            cells = self._enter(group, table[i], name)
            cells[first - i * size : stop - i * size] = contents[first - start : stop - start]
            written += [(table[i], slot) for slot in range(first - i * size, stop - i * size)]
        return written

    def _enter(self, group: int, block: int, name: str) -> list[int]:
        require(block != NULL_BLOCK, f"{name}: a write to the null block in group {group}")
        if self.group_of[block] != group:
            self.erase(block)
            self.group_of[block] = group
        return self.cells[block]

    def missing(self, group: int, table: Sequence[int], start: int, stop: int, chain: Sequence[int]) -> list[Cell]:
        """Cells with wrong content among positions [first needed by the token at ``start``, ``stop``).

        In a recurrent group that is the state before ``start``.
        """
        kind, size = self.groups[group], self.block_size
        if kind.kind == "recurrent":
            block = table[(start - 1) // size] if start else NULL_BLOCK
            right = not start or (self.group_of[block] == group and self.cells[block][0] == chain[start - 1])
            return [] if right else [(block, 0)]
        needed = max(0, start - kind.sliding_window + 1) if kind.kind == "sliding" else 0
        wrong: list[Cell] = []
        for i in range(needed // size, -(-stop // size)):
            block, base = table[i], i * size
            first, last = max(needed, base), min(stop, base + size)
            cells = self.cells[block] if self.group_of[block] == group else [GARBAGE] * size
            if cells[first - base : last - base] != chain[first:last]:
                wrong += [(block, p - base) for p in range(first, last) if cells[p - base] != chain[p]]
        return wrong


class ShadowExecutor:
    """Applies plans as an executor would, and checks that every row reads the KV of its own tokens.

    KV of all rows is written before any row attends; recurrent states are read before any is written.
    """

    def __init__(self, config: EngineConfig) -> None:
        cache = config.cache
        self.kv = ShadowKV(cache.num_blocks, cache.block_size, cache.groups)
        self.max_model_len = config.scheduler.max_model_len
        self.lookahead = config.speculation.lookahead_tokens
        self.texts: dict[int, Text] = {}
        self.tables: dict[int, list[list[int]]] = {}
        self.retired: set[int] = set()

    def apply(self, plan: StepPlan) -> None:
        """New sequences, block tables, retirements, in this order."""
        for new in plan.first:
            require(new.seq not in self.texts and new.seq not in self.retired, f"sequence {new.seq} introduced twice")
            self.texts[new.seq] = Text(new.source.tokens(0, new.source.length))
            self.tables[new.seq] = [[] for _ in self.kv.groups]
        for update in plan.blocks:
            require(update.seq in self.tables, f"blocks for sequence {update.seq}, which is not known")
            table = self.tables[update.seq][update.group]
            if update.replace:
                table.clear()
            table += update.blocks
        for seq in plan.retired:
            require(seq in self.texts, f"sequence {seq} retired, which is not known")
            del self.texts[seq], self.tables[seq]
            self.retired.add(seq)

    def run(
        self,
        plan: StepPlan,
        accepted: Sequence[int],
        inert: AbstractSet[int],
        lost: set[Cell],
        fenced: Callable[[int], bool],
    ) -> set[int]:
        """Run all rows but the ``inert`` ones; returns the rows that read what an inert row or a failed load owed.

        ``accepted``: how many drafts of each row. ``lost``: cells that a failed load of this step left empty.
        ``fenced``: blocks that a transfer writes.

        Raises:
            Wrong: a row reads KV that was never computed, or writes where a transfer does.
        """
        contents = [self._contents(row) for row in plan.rows]
        tainted: set[int] = set()
        for i, row in enumerate(plan.rows):  # recurrent states are read before any is written
            missing = self._missing(row, contents[i], recurrent=True) if i not in inert else []
            self._excuse(row, missing, lost)
            if missing:
                tainted.add(i)
        written = []
        for i, row in enumerate(plan.rows):
            spoilt = i in inert or i in tainted
            cells = self._write(row, [GARBAGE] * row.n if spoilt else contents[i], accepted[i], fenced)
            written.append(cells)
            if spoilt:
                lost.update(cells)
        pending = [i for i in range(len(plan.rows)) if i not in inert and i not in tainted]
        changed = True
        while changed:
            changed = False
            for i in pending:
                row = plan.rows[i]
                if i not in tainted and (missing := self._missing(row, contents[i], recurrent=False)):
                    self._excuse(row, missing, lost)
                    tainted.add(i)
                    lost.update(self._write(row, [GARBAGE] * row.n, accepted[i], fenced))
                    changed = True
        return tainted

    def _contents(self, row: Row) -> list[int]:
        """What the row writes, drafts included. A row that samples reaches the last known token."""
        text, name = self.texts[row.seq], f"sequence {row.seq}"
        known_end = row.start + row.n - len(row.drafts)
        require(row.start < known_end <= len(text), f"{name}: positions [{row.start}, {known_end}) of {len(text)}")
        if row.samples:
            text.cut(known_end)
        return text.chain[row.start : known_end] + text.continued(known_end, row.drafts)

    def _write(self, row: Row, contents: Sequence[int], accepted: int, fenced: Callable[[int], bool]) -> list[Cell]:
        """A row's KV in every group, with blocks for what a drafter writes beyond it; no state of rejected drafts."""
        counts = row.n - len(row.drafts) + accepted
        name, cells = f"sequence {row.seq}", []
        end = min(row.start + row.n + self.lookahead, self.max_model_len)
        for group, table in enumerate(self.tables[row.seq]):
            require(end <= len(table) * self.kv.block_size, f"{name}: {len(table)} blocks for positions up to {end}")
            recurrent = self.kv.groups[group].kind == "recurrent"
            cells += self.kv.write(group, table, row.start, contents[:counts] if recurrent else contents, name)
        for block, _ in cells:
            require(not fenced(block), f"{name}: writes block {block}, which a transfer still writes")
        return cells

    def _missing(self, row: Row, contents: Sequence[int], *, recurrent: bool) -> list[Cell]:
        chain = self.texts[row.seq].chain[: row.start] + list(contents)
        missing: list[Cell] = []
        for group, table in enumerate(self.tables[row.seq]):
            if (self.kv.groups[group].kind == "recurrent") == recurrent:
                missing += self.kv.missing(group, table, row.start, row.start + row.n, chain)
        return missing

    def _excuse(self, row: Row, missing: Sequence[Cell], lost: AbstractSet[Cell]) -> None:
        bad = [cell for cell in missing if cell not in lost]
        require(not bad, f"sequence {row.seq}: {row} reads (block, slot) {bad}, which do not hold its KV")
