"""Which blocks are to be made next, and out of what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from farflung.coded.blocks import bounds_of
from farflung.coded.codes import MDS, Code
from farflung.coded.messages import Columns, Part, Rows, Source
from farflung.coded.recombination import combination
from farflung.coded.redundancy import missing_ranks
from farflung.coded.roster import Block, Kind, Partition, Roster

__all__ = ["Order", "Planner"]

Order: TypeAlias = Rows | Columns
_DRAWS = 8
"""How many rows are drawn for a block that is to make up for a loss; the best of them is taken."""


@dataclass(frozen=True, slots=True)
class Planner:
    """Orders blocks, and enters them in the roster as being made.

    Args:
      code: draws rows.
      seed: by which.
      coded: how many coded blocks of each kind there are at first.
      redundancy: so many devices may vanish at any time, in the worst case; where that is not so any more, blocks are
        made that make up for it.
      kinds: of the blocks that there are.
    """

    code: Code
    seed: int
    coded: int
    redundancy: int
    kinds: tuple[Kind, ...]

    # --- at first ---------------------------------------------------------------------------------------------------

    def begin(self, roster: Roster) -> Iterator[tuple[int, Order]]:
        """The blocks to begin with: coded ones of rows, then those of columns, raw and coded.

        Devices that bring no data come first where coded blocks go, and then the others.
        """
        active = roster.active
        raw = {block.holder for block in roster.of("rows")}
        hosts = [rank for rank in roster.heard if rank not in raw] + [
            rank for rank in roster.heard if rank in raw
        ]
        chosen = [hosts[index % len(hosts)] for index in range(self.coded)]
        for index, rank in enumerate(chosen):
            yield rank, self._drawn(roster, rank, index)
        if "columns" not in self.kinds:
            return
        roster.bounds = bounds_of(roster.features, len(active))
        for k, partition in enumerate(active):
            block = roster.raw(partition)
            rank = hosts[k % len(hosts)] if block is None or block.holder is None else block.holder
            yield from self._columns(roster, rank, {k: 1.0}, roster.active)
        for index, rank in enumerate(chosen):
            weights = self._row(index, roster.column_blocks, self.seed + 1)
            yield from self._columns(roster, rank, weights, roster.active)

    def _drawn(self, roster: Roster, rank: int, index: int) -> Rows:
        """A coded block whose row the device draws."""
        active = roster.active
        held = [roster.raw(partition) for partition in active]
        coefficients = self._row(index, len(active), self.seed)
        raw = tuple(Source(_holder(one), one.number, 1.0) for one in held if one is not None)
        return self._rows(
            roster, rank, {active[k].number: weight for k, weight in coefficients.items()}, (), index, raw
        )

    # --- later ------------------------------------------------------------------------------------------------------

    def mend(self, roster: Roster) -> Iterator[tuple[int, Order]]:
        """What is to be made after members or partitions have changed."""
        yield from self._hand_over(roster)
        yield from self._missing_parts(roster)
        if not roster.active:
            return
        yield from self._extensions(roster)
        yield from self._for_newcomers(roster)
        for kind in self.kinds:
            yield from self._more(roster, kind)

    def _hand_over(self, roster: Roster) -> Iterator[tuple[int, Order]]:
        """Raw blocks of devices that would like to go."""
        for block in list(roster.blocks.values()):
            leaver = roster.members.get(-1 if block.holder is None else block.holder)
            if leaver is None or not leaver.leaving or not block.ready or block.raw is None:
                continue
            if any(
                other is not block and other.raw == block.raw for other in self._staying(roster, block.kind)
            ):
                continue
            host = self._host(roster, block.kind)
            if host is None:
                continue
            source = Source(leaver.rank, block.number, 1.0)
            if block.kind == "rows":
                yield host, self._rows(roster, host, {block.raw: 1.0}, (source,))
            else:
                parts = [one for one in roster.partitions if one.number in block.parts]
                given = {one.number: (source,) for one in parts}
                yield from self._columns(roster, host, block.coefficients, parts, given)

    def _missing_parts(self, roster: Roster) -> Iterator[tuple[int, Order]]:
        """Parts of column blocks for partitions that came later, and partitions again that these need."""
        if not roster.bounds:
            return
        decodable = roster.decodable("columns")
        for partition in roster.partitions:
            lacking = [
                block
                for block in roster.there("columns")
                if partition.number not in block.parts | block.making
                and not roster.members[_holder(block)].unable
            ]
            if (decodable and not lacking) or not roster.recoverable(partition):
                continue
            if roster.raw(partition) is not None:
                for block in lacking:
                    yield from self._parts(roster, block, [partition], {})
            elif not any(block.raw == partition.number and not block.ready for block in roster.of("rows")):
                yield from self._repair(roster, partition)

    def _repair(self, roster: Roster, partition: Partition) -> Iterator[tuple[int, Order]]:
        """A partition anew, out of coded blocks."""
        blocks, host = roster.there("rows"), self._host(roster, "rows")
        sources = self._sources(roster, {partition.number: 1.0}, blocks)
        if host is not None and sources is not None:
            yield host, self._rows(roster, host, {partition.number: 1.0}, sources)

    def _extensions(self, roster: Roster) -> Iterator[tuple[int, Order]]:
        """Coded blocks with the partitions that no coded block has.

        Each takes one up with the probability with which the code has partitions in its blocks; at least one does.
        """
        coded = [block for block in roster.of("rows") if block.raw is None]
        extended = [block for block in coded if block.ready and block.holder in self._makers(roster)]
        if not extended:
            return
        covered = set[int]().union(*[block.coefficients for block in coded])
        more: dict[int, list[tuple[Block, float]]] = {block.number: [] for block in extended}
        for partition in roster.active:
            raw = roster.raw(partition)
            if raw is None or partition.number in covered:
                continue
            weights = {block.number: self._grown(block, partition.number) for block in extended}
            if not any(weights.values()):
                weights[extended[0].number] = 1.0
            for number, weight in weights.items():
                if weight:
                    more[number].append((raw, weight))
        for block in extended:
            added = more[block.number]
            if added:
                rank = _holder(block)
                sources = [
                    Source(rank, block.number, 1.0),
                    *(Source(_holder(raw), raw.number, weight) for raw, weight in added),
                ]
                coefficients = {
                    **block.coefficients,
                    **{number: weight for raw, weight in added for number in raw.coefficients},
                }
                order = self._rows(roster, rank, coefficients, tuple(sources))
                roster.blocks[order.block].replaces = block.number
                yield rank, order

    def _for_newcomers(self, roster: Roster) -> Iterator[tuple[int, Order]]:
        """Coded blocks for devices that have come since, and bring nothing."""
        for kind in self.kinds:
            for rank in self._makers(roster):
                brings = any(block.holder == rank and block.raw is not None for block in roster.of("rows"))
                if (
                    not roster.members[rank].late
                    or brings
                    or any(one.holder == rank for one in roster.of(kind))
                ):
                    continue
                drawn = self._draw(roster, kind)
                made = (drawn, ()) if kind == "columns" else self._recombined(roster, drawn)
                if made is not None:
                    yield from self._coded(roster, kind, rank, *made)

    def _more(self, roster: Roster, kind: Kind) -> Iterator[tuple[int, Order]]:
        """New coded blocks until enough devices may vanish, or nothing helps."""
        for _ in range(2 * len(roster.members)):
            if not any(self._lacking(roster, kind)):
                return
            best = self._best(roster, kind)
            if best is None:
                return
            yield from self._coded(roster, kind, *best)

    def _coded(
        self,
        roster: Roster,
        kind: Kind,
        rank: int,
        coefficients: Mapping[int, float],
        sources: tuple[Source, ...],
    ) -> Iterator[tuple[int, Order]]:
        if kind == "rows":
            yield rank, self._rows(roster, rank, coefficients, sources)
        else:
            yield from self._columns(roster, rank, coefficients, roster.active)

    def _draw(self, roster: Roster, kind: Kind) -> dict[int, float]:
        """A row of the code that was not drawn before."""
        unknowns = roster.unknowns(kind)
        drawn = self._row(roster.number(), len(unknowns), self.seed + (kind == "columns"))
        return {unknowns[k]: weight for k, weight in drawn.items()}

    def _best(self, roster: Roster, kind: Kind) -> tuple[int, Mapping[int, float], tuple[Source, ...]] | None:
        """Of some draws, the row that helps most; ``None``: none does."""
        host = self._host(roster, kind)
        if host is None:
            return None
        least, best = self._lacking(roster, kind), None
        for _ in range(_DRAWS):
            drawn = self._draw(roster, kind)
            made = (drawn, ()) if kind == "columns" else self._recombined(roster, drawn)
            if made is None:
                continue
            lacking = self._lacking(roster, kind, Block(-1, kind, made[0], host))
            if lacking < least:
                least, best = lacking, (host, *made)
            if not any(lacking):
                break
        return best

    def _recombined(
        self, roster: Roster, drawn: Mapping[int, float]
    ) -> tuple[Mapping[int, float], tuple[Source, ...]] | None:
        """A drawn row, where each partition that is gone is replaced by a coded block that has it in it."""
        total: dict[int, float] = {}
        sources = []
        for number, weight in drawn.items():
            block = roster.raw(roster.partitions[number])
            if block is None:
                covering = [one for one in roster.answering("rows") if one.coefficients.get(number)]
                if not covering:
                    continue
                block = min(covering, key=lambda one: len(one.coefficients))
            sources.append(Source(_holder(block), block.number, weight))
            for other, coefficient in block.coefficients.items():
                total[other] = total.get(other, 0.0) + weight * coefficient
        total = {number: weight for number, weight in total.items() if weight}
        return (total, tuple(sources)) if total else None

    def _lacking(self, roster: Roster, kind: Kind, more: Block | None = None) -> list[int]:
        """The ranks that would be missing after losses of none, of one, and so on to as many devices as may vanish,
        each summed over all such losses; as far as their sets may be tried.

        Blocks that are being made count as there.
        """
        active, unknowns = {one.number for one in roster.active}, roster.unknowns(kind)
        blocks = [
            block
            for block in self._staying(roster, kind)
            if active.issuperset(block.coefficients if kind == "rows" else ())
        ]
        considered = blocks if more is None else [*blocks, more]
        holders = [block.holder for block in considered]
        return list(missing_ranks(roster.matrix(considered, unknowns), holders, enough=self.redundancy))

    # --- orders -----------------------------------------------------------------------------------------------------

    def _rows(
        self,
        roster: Roster,
        rank: int,
        coefficients: Mapping[int, float],
        sources: tuple[Source, ...],
        index: int = -1,
        raw: tuple[Source, ...] = (),
    ) -> Rows:
        number = roster.number()
        roster.blocks[number] = Block(number, "rows", coefficients, rank)
        height = max(roster.partitions[one].rows for one in coefficients)
        return Rows(number, height, roster.features, index, raw, sources)

    def _columns(
        self,
        roster: Roster,
        rank: int,
        coefficients: Mapping[int, float],
        partitions: Sequence[Partition],
        given: Mapping[int, tuple[Source, ...]] | None = None,
    ) -> Iterator[tuple[int, Columns]]:
        """A block of columns; none where the rows of a partition are nowhere to be had."""
        number = roster.number()
        block = roster.blocks[number] = Block(number, "columns", coefficients, rank)
        yield from self._parts(roster, block, partitions, given or {})
        if not block.making:
            del roster.blocks[number]

    def _parts(
        self,
        roster: Roster,
        block: Block,
        partitions: Sequence[Partition],
        given: Mapping[int, tuple[Source, ...]],
    ) -> Iterator[tuple[int, Columns]]:
        """Parts of a block of columns, from who has the rows, or else out of the same parts of other blocks."""
        weights = tuple(block.coefficients.get(k, 0.0) for k in range(roster.column_blocks))
        parts = []
        for partition in partitions:
            raw, sources = roster.raw(partition), given.get(partition.number)
            if whole := sources is None and raw is not None:
                sources = (Source(_holder(raw), raw.number, 1.0),)
            elif sources is None:
                there = [one for one in roster.there("columns") if partition.number in one.parts]
                sources = self._sources(roster, block.coefficients, there)
            if sources is None:
                return
            parts.append(Part(partition.number, partition.rows, whole, sources))
        block.making.update(part.partition for part in parts)
        yield _holder(block), Columns(block.number, weights, roster.bounds, tuple(parts))

    def _sources(
        self, roster: Roster, wanted: Mapping[int, float], blocks: Sequence[Block]
    ) -> tuple[Source, ...] | None:
        """Blocks that add up to what is wanted; ``None``: they do not."""
        unknowns = sorted({*wanted, *(one for block in blocks for one in block.coefficients)})
        target = torch.tensor([wanted.get(one, 0.0) for one in unknowns], dtype=torch.float64)
        rows = dict(enumerate(roster.matrix(blocks, unknowns)))
        found = combination(target, rows) if rows else None
        if found is None:
            return None
        return tuple(
            Source(_holder(blocks[place]), blocks[place].number, weight) for place, weight in found.items()
        )

    # --- where ------------------------------------------------------------------------------------------------------

    def _grown(self, block: Block, partition: int) -> float:
        """The coefficient that a coded block gives a partition that comes later."""
        row = torch.tensor([block.coefficients.get(k, 0.0) for k in range(partition)], dtype=torch.float64)
        return float(
            self._law(block.number, partition + 1).grown(row, block.number, self.seed, partition + 1)[-1]
        )

    def _law(self, index: int, unknowns: int) -> Code:
        """The code, or where that has no such row, a dense one."""
        most = self.code.most(unknowns)
        return self.code if most is None or index < most else MDS()

    def _row(self, index: int, unknowns: int, seed: int) -> dict[int, float]:
        row = self._law(index, unknowns).row(index, unknowns, seed)
        return {k: float(weight) for k, weight in enumerate(row) if weight}

    def _staying(self, roster: Roster, kind: Kind) -> list[Block]:
        """Blocks with devices that are heard and stay, made or being made."""
        return [block for block in roster.of(kind) if block.holder in self._hosts(roster)]

    def _hosts(self, roster: Roster) -> list[int]:
        return [rank for rank in roster.heard if not roster.members[rank].leaving]

    def _host(self, roster: Roster, kind: Kind) -> int | None:
        """The device with the fewest blocks."""
        held = [block.holder for block in roster.of(kind)]
        return min(self._makers(roster), key=lambda rank: (held.count(rank), rank), default=None)

    def _makers(self, roster: Roster) -> list[int]:
        """Those that can be asked for another block."""
        members = roster.members
        return [rank for rank in self._hosts(roster) if not (members[rank].unable or members[rank].rests)]


def _holder(block: Block) -> int:
    assert block.holder is not None
    return block.holder
