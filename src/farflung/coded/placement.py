"""Placement of blocks: chooses the next block, its device, and its sources."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from farflung.coded.codes import Code, combination, missing_ranks
from farflung.coded.messages import Columns, Part, Rows, Source
from farflung.coded.registry import Block, Kind, Partition, Placed, Registry, matrix

__all__ = ["Placement"]

_DRAWS = 8
"""Number of rows of the code to compare if rank is missing."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Chooses the next block as a function of the registry.

    Each device gets a block of each kind. Further blocks are built while losses of at most ``redundancy``
    devices would leave a rank too low. The choice reduces the missing rank most, with the fewest fetched
    partitions.

    Args:
      code: Code that draws rows.
      seed: Seed of the code.
      redundancy: Number of devices that may vanish at any time, in the worst case.
      kinds: Kinds of blocks.
    """

    code: Code
    seed: int
    redundancy: int
    kinds: tuple[Kind, ...]

    def next(self, registry: Registry) -> Placed | None:
        """Returns the next block; ``None`` if nothing is missing, or nothing helps."""
        if not registry.active:
            return None
        rules = [
            self._parts(registry),
            *(self._first(registry, kind) for kind in self.kinds),
            *(self._best(registry, kind) for kind in self.kinds),
        ]
        return next(itertools.chain.from_iterable(rules), None)

    # --- rules ------------------------------------------------------------------------------------------------------

    def _parts(self, registry: Registry) -> Iterator[Placed]:
        """Adds the rows of later partitions to blocks of columns, and restores partitions that these need."""
        ready_blocks = registry.there("columns")
        for partition in registry.partitions if registry.bounds else ():
            incomplete_blocks = [
                block
                for block in ready_blocks
                if partition.number not in block.parts
                and partition.number not in block.making
                and not registry.members[_holder(block)].unable
            ]
            if registry.raw(partition) is not None:
                for block in incomplete_blocks:
                    order = self._columns(registry, block, [partition])
                    if order is not None:
                        yield Placed(block, order)
            elif (
                (incomplete_blocks or not registry.decodable("columns"))
                and registry.recoverable(partition)
                and not any(
                    block.raw == partition.number and not block.ready for block in registry.of("rows")
                )
            ):
                yield from self._made(registry, "rows", self._host(registry, "rows"), {partition.number: 1.0})

    def _first(self, registry: Registry, kind: Kind) -> Iterator[Placed]:
        """Places a block on each device without one: a raw copy that no host has, or a row of the code."""
        holders = {block.holder for block in registry.of(kind)}
        data = {block.holder for block in registry.of("rows") if block.raw is not None}
        for rank in sorted(registry.makers, key=lambda rank: rank not in data):
            if rank not in holders:
                for row in (*self._copies(registry, kind), *self._rows(registry, kind, rank)):
                    yield from self._made(registry, kind, rank, row)

    def _best(self, registry: Registry, kind: Kind) -> Iterator[Placed]:
        """Places the block that reduces the missing rank most."""
        deficits = self._lacking(registry, kind)
        candidates: list[tuple[list[int], int, int, Placed]] = []
        for place, proposal in enumerate(self._candidates(registry, kind) if any(deficits) else ()):
            new_deficits = self._lacking(registry, kind, proposal.block)
            if new_deficits < deficits:
                fetched = 0
                if isinstance(proposal.order, Rows):
                    fetched = sum(source.rank != proposal.block.holder for source in proposal.order.sources)
                candidates.append((new_deficits, fetched, place, proposal))
                if new_deficits[1] < deficits[1]:  # no block reduces the present deficit by more than one
                    break
        if candidates:
            yield min(candidates, key=lambda candidate: candidate[:3])[-1]

    # --- candidates -------------------------------------------------------------------------------------------------

    def _candidates(self, registry: Registry, kind: Kind) -> Iterator[Placed]:
        host = self._host(registry, kind)
        for row in self._copies(registry, kind):
            yield from self._made(registry, kind, host, row)
        if kind == "rows":
            yield from self._extended(registry)
        for row in self._rows(registry, kind, host):
            yield from self._made(registry, kind, host, row)

    def _copies(self, registry: Registry, kind: Kind) -> list[Mapping[int, float]]:
        """Lists the raw copies that no host has or builds."""
        raw = {block.raw for block in self._staying(registry, kind)}
        return [{unknown: 1.0} for unknown in registry.unknowns(kind) if unknown not in raw]

    def _rows(self, registry: Registry, kind: Kind, rank: int | None) -> Iterator[Mapping[int, float]]:
        """Yields the rows of a device's incomplete coded blocks, then draws unused rows."""
        for block in registry.begun(kind, rank):
            if block.raw is None:
                yield block.coefficients
        unknowns, seed = registry.unknowns(kind), self.seed + (kind == "columns")
        plain = len(registry.partitions) if kind == "rows" else registry.column_blocks
        begin = max(0, sum(block.kind == kind for block in registry.blocks.values()) - plain)
        for index in range(begin, begin + _DRAWS):
            row = self.code.row(index, len(unknowns), seed).tolist()
            yield {unknown: weight for unknown, weight in zip(unknowns, row, strict=True) if weight}

    def _extended(self, registry: Registry) -> Iterator[Placed]:
        """Adds the partitions that no coded block contains to each of the coded blocks."""
        coded = [block for block in self._staying(registry, "rows") if block.raw is None]
        covered_partitions = set[int]().union(*(block.coefficients for block in coded))
        copies = [
            raw
            for partition in registry.active
            if partition.number not in covered_partitions and (raw := registry.raw(partition)) is not None
        ]
        for block in coded if copies else ():
            if block.ready and block.holder in registry.makers:
                sources = tuple(Source(_holder(source), source.number, 1.0) for source in (block, *copies))
                coefficients = {
                    **block.coefficients,
                    **{raw.raw: 1.0 for raw in copies if raw.raw is not None},
                }
                yield self._placed(registry, _holder(block), coefficients, sources, replaces=block.number)

    def _lacking(self, registry: Registry, kind: Kind, more: Block | None = None) -> list[int]:
        """Counts raw copies that only leaving devices have, then the missing ranks after losses.

        Losses of none, of one, and so on up to :attr:`redundancy` devices are each summed over all sets, up to
        the first nonzero sum. Blocks that are being built count as present.
        """
        active, unknowns = {partition.number for partition in registry.active}, registry.unknowns(kind)
        blocks = [
            block
            for block in [*self._staying(registry, kind), *([] if more is None else [more])]
            if (more is None or block.number != more.replaces)
            and active.issuperset(block.coefficients if kind == "rows" else ())
        ]
        host_copies = {block.raw for block in blocks}
        deficits = [len({block.raw for block in registry.there(kind) if block.raw in unknowns} - host_copies)]
        holders = [block.holder for block in blocks]
        for deficit in missing_ranks(matrix(blocks, unknowns), holders, enough=self.redundancy):
            deficits.append(deficit)
            if deficit:
                break
        return deficits

    # --- orders -----------------------------------------------------------------------------------------------------

    def _made(
        self, registry: Registry, kind: Kind, rank: int | None, coefficients: Mapping[int, float]
    ) -> Iterator[Placed]:
        if rank is None:
            return
        if kind == "rows":
            sources = self._sources(registry, rank, coefficients, registry.there("rows"))
            if sources is not None:
                yield self._placed(registry, rank, coefficients, sources)
            return
        block = Block(self._number(registry, "columns", rank, coefficients), "columns", coefficients, rank)
        order = self._columns(registry, block, registry.active)
        if order is not None:
            yield Placed(block, order)

    def _placed(
        self,
        registry: Registry,
        rank: int,
        coefficients: Mapping[int, float],
        sources: tuple[Source, ...],
        replaces: int | None = None,
    ) -> Placed:
        number = (
            registry.next_number
            if replaces is not None
            else self._number(registry, "rows", rank, coefficients)
        )
        block = Block(number, "rows", coefficients, rank, replaces=replaces)
        height = max(registry.partitions[partition].rows for partition in coefficients)
        return Placed(block, Rows(block.number, height, registry.features, sources))

    def _number(self, registry: Registry, kind: Kind, rank: int, coefficients: Mapping[int, float]) -> int:
        """Returns the number of a block, which an incomplete block of the device keeps."""
        numbers = (block.number for block in registry.begun(kind, rank) if block.coefficients == coefficients)
        return next(numbers, registry.next_number)

    def _columns(self, registry: Registry, block: Block, partitions: Sequence[Partition]) -> Columns | None:
        """Builds the order of parts of a column block, from raw copies or the same parts of other blocks."""
        parts = []
        for partition in partitions:
            raw = registry.raw(partition)
            if raw is not None:
                sources: tuple[Source, ...] | None = (Source(_holder(raw), raw.number, 1.0),)
            else:
                candidates = [
                    source for source in registry.there("columns") if partition.number in source.parts
                ]
                sources = self._sources(registry, _holder(block), block.coefficients, candidates)
            if sources is None:
                return None
            parts.append(Part(partition.number, partition.rows, raw is not None, sources))
        weights = tuple(block.coefficients.get(k, 0.0) for k in range(registry.column_blocks))
        return Columns(block.number, weights, registry.bounds, tuple(parts))

    def _sources(
        self, registry: Registry, rank: int, wanted: Mapping[int, float], blocks: Sequence[Block]
    ) -> tuple[Source, ...] | None:
        """Finds blocks with a given sum, the device's own first; ``None`` if there are none."""
        blocks = sorted(blocks, key=lambda block: block.holder != rank)
        unknowns = sorted({*wanted, *(unknown for block in blocks for unknown in block.coefficients)})
        target = torch.tensor([wanted.get(unknown, 0.0) for unknown in unknowns], dtype=torch.float64)
        terms = combination(target, dict(enumerate(matrix(blocks, unknowns))))
        if terms is None:
            return None
        return tuple(
            Source(_holder(blocks[place]), blocks[place].number, weight) for place, weight in terms.items()
        )

    # --- hosts ------------------------------------------------------------------------------------------------------

    def _staying(self, registry: Registry, kind: Kind) -> list[Block]:
        """Lists the blocks of hosts, built or not, except those being replaced."""
        hosts = registry.hosts
        host_blocks = [block for block in registry.of(kind) if block.holder in hosts]
        replaced_numbers = {block.replaces for block in host_blocks}
        return [block for block in host_blocks if block.number not in replaced_numbers]

    def _host(self, registry: Registry, kind: Kind) -> int | None:
        """Returns the device with the fewest blocks."""
        holders = [block.holder for block in registry.of(kind)]
        return min(registry.makers, key=lambda rank: (holders.count(rank), rank), default=None)


def _holder(block: Block) -> int:
    assert block.holder is not None
    return block.holder
