"""Placement of blocks: chooses the next block, its device, and its sources."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from farflung.coded.codes import Code, compute_rank_deficits, find_combination
from farflung.coded.messages import BlockPart, BlockSource, Columns, Rows
from farflung.coded.registry import Block, BlockRegistry, DevicePartition, Kind, PlacedBlock, build_matrix

__all__ = ["Placement"]

_NUM_DRAWS = 8
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

    def choose_block(self, registry: BlockRegistry) -> PlacedBlock | None:
        """Returns the next block; ``None`` if nothing is missing, or nothing helps."""
        if not registry.active_partitions:
            return None
        rules = [
            self._place_parts(registry),
            *(self._place_first_blocks(registry, kind) for kind in self.kinds),
            *(self._place_best_block(registry, kind) for kind in self.kinds),
        ]
        return next(itertools.chain.from_iterable(rules), None)

    # --- rules ------------------------------------------------------------------------------------------------------

    def _place_parts(self, registry: BlockRegistry) -> Iterator[PlacedBlock]:
        """Adds the rows of later partitions to blocks of columns, and restores partitions that these need."""
        ready_blocks = registry.list_ready_blocks("columns")
        for partition in registry.partitions if registry.bounds else ():
            incomplete_blocks = [
                block
                for block in ready_blocks
                if partition.number not in block.parts
                and partition.number not in block.pending_parts
                and not registry.devices[_get_holder(block)].cannot_build
            ]
            if registry.find_raw_block(partition) is not None:
                for block in incomplete_blocks:
                    order = self._build_column_order(registry, block, [partition])
                    if order is not None:
                        yield PlacedBlock(block, order)
            elif (
                (incomplete_blocks or not registry.is_decodable("columns"))
                and registry.is_recoverable(partition)
                and not any(
                    block.raw_unknown == partition.number and not block.is_ready
                    for block in registry.list_blocks("rows")
                )
            ):
                yield from self._place_block(
                    registry, "rows", self._choose_host(registry, "rows"), {partition.number: 1.0}
                )

    def _place_first_blocks(self, registry: BlockRegistry, kind: Kind) -> Iterator[PlacedBlock]:
        """Places a block on each device without one: a raw copy that no host has, or a row of the code."""
        holders = {block.holder for block in registry.list_blocks(kind)}
        data = {block.holder for block in registry.list_blocks("rows") if block.raw_unknown is not None}
        for rank in sorted(registry.builder_ranks, key=lambda rank: rank not in data):
            if rank not in holders:
                for row in (*self._list_copies(registry, kind), *self._draw_rows(registry, kind, rank)):
                    yield from self._place_block(registry, kind, rank, row)

    def _place_best_block(self, registry: BlockRegistry, kind: Kind) -> Iterator[PlacedBlock]:
        """Places the block that reduces the missing rank most."""
        deficits = self._compute_deficits(registry, kind)
        candidates: list[tuple[list[int], int, int, PlacedBlock]] = []
        for place, proposal in enumerate(self._list_candidates(registry, kind) if any(deficits) else ()):
            new_deficits = self._compute_deficits(registry, kind, proposal.block)
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

    def _list_candidates(self, registry: BlockRegistry, kind: Kind) -> Iterator[PlacedBlock]:
        host = self._choose_host(registry, kind)
        for row in self._list_copies(registry, kind):
            yield from self._place_block(registry, kind, host, row)
        if kind == "rows":
            yield from self._extend_blocks(registry)
        for row in self._draw_rows(registry, kind, host):
            yield from self._place_block(registry, kind, host, row)

    def _list_copies(self, registry: BlockRegistry, kind: Kind) -> list[Mapping[int, float]]:
        """Lists the raw copies that no host has or builds."""
        raw = {block.raw_unknown for block in self._list_host_blocks(registry, kind)}
        return [{unknown: 1.0} for unknown in registry.list_unknowns(kind) if unknown not in raw]

    def _draw_rows(
        self, registry: BlockRegistry, kind: Kind, rank: int | None
    ) -> Iterator[Mapping[int, float]]:
        """Yields the rows of a device's incomplete coded blocks, then draws unused rows."""
        for block in registry.list_partial_blocks(kind, rank):
            if block.raw_unknown is None:
                yield block.coefficients
        unknowns, seed = registry.list_unknowns(kind), self.seed + (kind == "columns")
        plain = len(registry.partitions) if kind == "rows" else registry.num_column_blocks
        begin = max(0, sum(block.kind == kind for block in registry.blocks.values()) - plain)
        for index in range(begin, begin + _NUM_DRAWS):
            row = self.code.draw_row(index, len(unknowns), seed).tolist()
            yield {unknown: weight for unknown, weight in zip(unknowns, row, strict=True) if weight}

    def _extend_blocks(self, registry: BlockRegistry) -> Iterator[PlacedBlock]:
        """Adds the partitions that no coded block contains to each of the coded blocks."""
        coded = [block for block in self._list_host_blocks(registry, "rows") if block.raw_unknown is None]
        covered_partitions = set[int]().union(*(block.coefficients for block in coded))
        copies = [
            raw
            for partition in registry.active_partitions
            if partition.number not in covered_partitions
            and (raw := registry.find_raw_block(partition)) is not None
        ]
        for block in coded if copies else ():
            if block.is_ready and block.holder in registry.builder_ranks:
                sources = tuple(
                    BlockSource(_get_holder(source), source.number, 1.0) for source in (block, *copies)
                )
                coefficients = {
                    **block.coefficients,
                    **{raw.raw_unknown: 1.0 for raw in copies if raw.raw_unknown is not None},
                }
                yield self._place_row_block(
                    registry, _get_holder(block), coefficients, sources, replaces=block.number
                )

    def _compute_deficits(self, registry: BlockRegistry, kind: Kind, extra: Block | None = None) -> list[int]:
        """Counts raw copies that only leaving devices have, then the missing ranks after losses.

        Losses of none, of one, and so on up to :attr:`redundancy` devices are each summed over all sets, up to
        the first nonzero sum. Blocks that are being built count as present.
        """
        active = {partition.number for partition in registry.active_partitions}
        unknowns = registry.list_unknowns(kind)
        blocks = [
            block
            for block in [*self._list_host_blocks(registry, kind), *([] if extra is None else [extra])]
            if (extra is None or block.number != extra.replaced_block)
            and active.issuperset(block.coefficients if kind == "rows" else ())
        ]
        host_copies = {block.raw_unknown for block in blocks}
        deficits = [
            len(
                {
                    block.raw_unknown
                    for block in registry.list_ready_blocks(kind)
                    if block.raw_unknown in unknowns
                }
                - host_copies
            )
        ]
        holders = [block.holder for block in blocks]
        for deficit in compute_rank_deficits(
            build_matrix(blocks, unknowns), holders, max_losses=self.redundancy
        ):
            deficits.append(deficit)
            if deficit:
                break
        return deficits

    # --- orders -----------------------------------------------------------------------------------------------------

    def _place_block(
        self, registry: BlockRegistry, kind: Kind, rank: int | None, coefficients: Mapping[int, float]
    ) -> Iterator[PlacedBlock]:
        if rank is None:
            return
        if kind == "rows":
            sources = self._find_sources(registry, rank, coefficients, registry.list_ready_blocks("rows"))
            if sources is not None:
                yield self._place_row_block(registry, rank, coefficients, sources)
            return
        block = Block(
            self._reuse_number(registry, "columns", rank, coefficients), "columns", coefficients, rank
        )
        order = self._build_column_order(registry, block, registry.active_partitions)
        if order is not None:
            yield PlacedBlock(block, order)

    def _place_row_block(
        self,
        registry: BlockRegistry,
        rank: int,
        coefficients: Mapping[int, float],
        sources: tuple[BlockSource, ...],
        replaces: int | None = None,
    ) -> PlacedBlock:
        number = (
            registry.new_block_number
            if replaces is not None
            else self._reuse_number(registry, "rows", rank, coefficients)
        )
        block = Block(number, "rows", coefficients, rank, replaced_block=replaces)
        height = max(registry.partitions[partition].rows for partition in coefficients)
        return PlacedBlock(block, Rows(block.number, height, registry.features, sources))

    def _reuse_number(
        self, registry: BlockRegistry, kind: Kind, rank: int, coefficients: Mapping[int, float]
    ) -> int:
        """Returns the number of the device's incomplete block with these coefficients, or else a new number."""
        numbers = (
            block.number
            for block in registry.list_partial_blocks(kind, rank)
            if block.coefficients == coefficients
        )
        return next(numbers, registry.new_block_number)

    def _build_column_order(
        self, registry: BlockRegistry, block: Block, partitions: Sequence[DevicePartition]
    ) -> Columns | None:
        """Builds the order of parts of a column block, from raw copies or the same parts of other blocks."""
        parts = []
        for partition in partitions:
            raw = registry.find_raw_block(partition)
            if raw is not None:
                sources: tuple[BlockSource, ...] | None = (BlockSource(_get_holder(raw), raw.number, 1.0),)
            else:
                candidates = [
                    source
                    for source in registry.list_ready_blocks("columns")
                    if partition.number in source.parts
                ]
                sources = self._find_sources(registry, _get_holder(block), block.coefficients, candidates)
            if sources is None:
                return None
            parts.append(BlockPart(partition.number, partition.rows, raw is not None, sources))
        weights = tuple(block.coefficients.get(k, 0.0) for k in range(registry.num_column_blocks))
        return Columns(block.number, weights, registry.bounds, tuple(parts))

    def _find_sources(
        self, registry: BlockRegistry, rank: int, coefficients: Mapping[int, float], blocks: Sequence[Block]
    ) -> tuple[BlockSource, ...] | None:
        """Finds blocks with a given sum, the device's own first; ``None`` if there are none."""
        blocks = sorted(blocks, key=lambda block: block.holder != rank)
        unknowns = sorted({*coefficients, *(unknown for block in blocks for unknown in block.coefficients)})
        target = torch.tensor([coefficients.get(unknown, 0.0) for unknown in unknowns], dtype=torch.float64)
        terms = find_combination(target, dict(enumerate(build_matrix(blocks, unknowns))))
        if terms is None:
            return None
        return tuple(
            BlockSource(_get_holder(blocks[place]), blocks[place].number, weight)
            for place, weight in terms.items()
        )

    # --- hosts ------------------------------------------------------------------------------------------------------

    def _list_host_blocks(self, registry: BlockRegistry, kind: Kind) -> list[Block]:
        """Lists the blocks of hosts, built or not, except those being replaced."""
        hosts = registry.host_ranks
        host_blocks = [block for block in registry.list_blocks(kind) if block.holder in hosts]
        replaced_numbers = {block.replaced_block for block in host_blocks}
        return [block for block in host_blocks if block.number not in replaced_numbers]

    def _choose_host(self, registry: BlockRegistry, kind: Kind) -> int | None:
        """Returns the device with the fewest blocks."""
        holders = [block.holder for block in registry.list_blocks(kind)]
        return min(registry.builder_ranks, key=lambda rank: (holders.count(rank), rank), default=None)


def _get_holder(block: Block) -> int:
    assert block.holder is not None
    return block.holder
