"""The coordinator's state of members, partitions and blocks, and its questions about rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from farflung.coded.codes import rank, redundancy
from farflung.coded.messages import Columns, Rows
from farflung.types import State

__all__ = ["Block", "Kind", "Member", "Partition", "Placed", "Registry", "matrix"]

Kind = Literal["rows", "columns"]
"""Of blocks: for products with weights, or with residuals."""

_TRIES = 3
"""Failed blocks in a row after which a device is asked for none for a while."""


@dataclass(slots=True)
class Partition:
    """Samples that a device has brought.

    Args:
      number: its column of the code.
      name: given by its device.
      labels: (rows,) float64.
      block: its number as a block.
      active: whether it is trained on.
    """

    number: int
    name: str
    labels: Tensor
    block: int
    active: bool = False

    @property
    def rows(self) -> int:
        return len(self.labels)


@dataclass(slots=True)
class Block:
    """A block of rows or of columns.

    Args:
      number: its name.
      kind: rows or columns.
      coefficients: of each partition, or of each column block, that is in it.
      holder: the device's rank; ``None``: the device is gone.
      ready: whether it is made.
      parts: of a block of columns, the partitions whose rows are in it.
      making: the partitions whose rows are being fetched.
      replaces: the block that is not needed any more when this one is made.
      begun_by: of a block that no device holds, the one that has a part of it, as it could not get the rest.
    """

    number: int
    kind: Kind
    coefficients: Mapping[int, float]
    holder: int | None
    ready: bool = False
    parts: set[int] = field(default_factory=set)
    making: set[int] = field(default_factory=set)
    replaces: int | None = None
    begun_by: int | None = None

    @property
    def raw(self) -> int | None:
        """The one partition, or column block, that it is a plain copy of."""
        (only, *more) = self.coefficients.items()
        return only[0] if not more and only[1] == 1.0 else None


@dataclass(slots=True)
class Member:
    """A device that takes part.

    Args:
      rank: its rank.
      silent: whether it has let a deadline pass, and not been heard since.
      leaving: whether it has asked to leave.
      unable: whether it could not make a block for reasons of its own; it is asked for no other.
      failures: orders in a row that failed and brought it no further than an earlier one.
      fetched_nbytes: the most bytes of a block that it could not complete, since it completed one.
    """

    rank: int
    silent: bool = False
    leaving: bool = False
    unable: bool = False
    failures: int = 0
    fetched_nbytes: int = 0

    @property
    def rests(self) -> bool:
        """Whether it has failed so often that it is asked for no block for a while."""
        return self.failures >= _TRIES

    @property
    def is_stuck(self) -> bool:
        """Returns True if its last two orders brought it no further, so that it may fail for ever."""
        return self.failures > 1

    def count_failure(self, fetched_nbytes: int) -> None:
        """Counts a failed order, unless more bytes came for its block than for any failed one before.

        So a device for which one source answers and another refuses stops counting as progress.

        Args:
          fetched_nbytes: the bytes of the block that the device keeps.
        """
        self.failures = 0 if fetched_nbytes > self.fetched_nbytes else self.failures + 1
        self.fetched_nbytes = max(self.fetched_nbytes, fetched_nbytes)


@dataclass(frozen=True, slots=True)
class Placed:
    """A block that is to be made, or added to, by its holder.

    Args:
      block: as it will be.
      order: for its holder.
    """

    block: Block
    order: Rows | Columns


class Registry:
    """Members, partitions and blocks."""

    def __init__(self) -> None:
        self.members: dict[int, Member] = {}
        self.partitions: list[Partition] = []
        self.blocks: dict[int, Block] = {}
        self.features = 0
        """Columns of the data; 0: not known yet."""
        self.bounds: tuple[int, ...] = ()
        """Of the column blocks, once training has a first set of partitions."""

    # --- as a value -------------------------------------------------------------------------------------------------

    def tree(self) -> State:
        """Gives the state that a restarted coordinator needs; the holders of blocks are left out, as devices tell."""
        return {
            "features": self.features,
            "bounds": list(self.bounds),
            "partitions": {
                str(partition.number): {
                    "name": partition.name,
                    "block": partition.block,
                    "active": partition.active,
                    "labels": partition.labels,
                }
                for partition in self.partitions
            },
            "blocks": [
                [block.number, block.kind, list(map(list, block.coefficients.items())), sorted(block.parts)]
                for block in self.blocks.values()
            ],
        }

    @classmethod
    def from_tree(cls, tree: State) -> Registry:
        """Reads the result of :meth:`tree`; the registry has no members."""
        registry = cls()
        registry.features, registry.bounds = tree["features"], tuple(tree["bounds"])
        for number, entry in sorted(tree["partitions"].items(), key=lambda item: int(item[0])):
            partition = Partition(int(number), entry["name"], entry["labels"], entry["block"], entry["active"])
            registry.partitions.append(partition)
        for number, kind, coefficients, parts in tree["blocks"]:
            mix = {int(unknown): float(weight) for unknown, weight in coefficients}
            registry.blocks[number] = Block(number, kind, mix, None, parts=set(parts))
        return registry

    # --- changes ----------------------------------------------------------------------------------------------------

    def place(self, placed: Placed) -> None:
        """Takes in a block that is being made."""
        block = placed.block
        self.blocks[block.number] = block
        if isinstance(placed.order, Columns):
            block.making.update(part.partition for part in placed.order.parts)

    def lose(self, rank: int) -> None:
        """Removes a device and what it held."""
        self.members.pop(rank, None)
        for block in self.blocks.values():
            if block.holder == rank:
                self.discard(block)
            if block.begun_by == rank:
                block.begun_by = None

    def forsake(self, partition: Partition) -> None:
        """Goes on without a partition that is lost, and without the blocks of rows that it is in."""
        for block in self.of("rows"):
            if partition.number in block.coefficients:
                self.discard(block)
        partition.active = False

    def discard(self, block: Block) -> None:
        """Takes a block from its holder; its coefficients stay known, should a device come back with it."""
        block.holder, block.ready = None, False
        block.making.clear()

    def built(self, block: Block, partitions: Iterable[int]) -> None:
        """Marks a block as made, or of a block of columns these parts; other orders for it may be under way."""
        block.ready = True
        built_parts = block.making.intersection(partitions)
        block.parts |= built_parts
        block.making -= built_parts

    def failed(self, block: Block) -> None:
        """Gives up an order; a block that was there before stays as it was."""
        block.making.clear()
        if not block.ready:
            block.begun_by = block.holder if block.replaces is None else None
            self.discard(block)

    # --- members and partitions -------------------------------------------------------------------------------------

    @property
    def heard(self) -> list[int]:
        """The ranks that are not silent."""
        return sorted(rank for rank, member in self.members.items() if not member.silent)

    @property
    def hosts(self) -> list[int]:
        """The ranks that are not silent and do not leave."""
        return [rank for rank in self.heard if not self.members[rank].leaving]

    @property
    def makers(self) -> list[int]:
        """The hosts that can be asked for another block."""
        members = self.members
        return [rank for rank in self.hosts if not (members[rank].unable or members[rank].rests)]

    @property
    def active(self) -> list[Partition]:
        """The partitions that are trained on."""
        return [partition for partition in self.partitions if partition.active]

    @property
    def column_blocks(self) -> int:
        """The number of blocks into which columns are cut."""
        return len(self.bounds) - 1

    def named(self, name: str) -> Partition | None:
        """Finds the partition of a name."""
        return next((partition for partition in self.partitions if partition.name == name), None)

    def unknowns(self, kind: Kind) -> list[int]:
        """Lists the unknowns of decoding: partitions that are trained on, or column blocks."""
        if kind == "rows":
            return [partition.number for partition in self.active]
        return list(range(self.column_blocks))

    # --- blocks -----------------------------------------------------------------------------------------------------

    @property
    def next_number(self) -> int:
        """The number of the next block; those that no device holds stay known."""
        return max(self.blocks, default=-1) + 1

    def of(self, kind: Kind) -> list[Block]:
        """Lists the blocks of a kind that devices hold, made or being made."""
        return [block for block in self.blocks.values() if block.kind == kind and block.holder is not None]

    def begun(self, kind: Kind, rank: int | None) -> list[Block]:
        """Lists the blocks of a kind of which a device has a part that it could not complete."""
        blocks = self.blocks.values()
        return [block for block in blocks if block.kind == kind and block.begun_by == rank is not None]

    def there(self, kind: Kind, *, silent: bool = False) -> list[Block]:
        """Lists the blocks that are made, with devices that are heard, or with silent ones too."""
        ranks = set(self.members) if silent else set(self.heard)
        return [block for block in self.of(kind) if block.ready and block.holder in ranks]

    def answering(self, kind: Kind) -> list[Block]:
        """Lists the blocks whose answers are products of all that is trained on."""
        active = {partition.number for partition in self.active}
        if kind == "rows":
            return [block for block in self.there(kind) if active.issuperset(block.coefficients)]
        return [block for block in self.there(kind) if active.issubset(block.parts)]

    def raw(self, partition: Partition) -> Block | None:
        """Finds a plain copy of a partition, with a device that is heard."""
        return next((block for block in self.there("rows") if block.raw == partition.number), None)

    def making(self) -> list[Block]:
        """Lists the blocks that devices which are heard are making."""
        ranks = self.heard
        return [
            block
            for block in self.blocks.values()
            if block.holder in ranks and (not block.ready or block.making)
        ]

    def can_go(self, rank: int) -> bool:
        """Tells whether other devices hold all plain copies that a device holds."""
        for kind in ("rows", "columns"):
            ready_blocks = self.there(kind)
            peer_blocks = [block for block in ready_blocks if block.holder != rank]
            for block in ready_blocks:
                if block.holder == rank and block.raw is not None:
                    if not any(peer_block.raw == block.raw and peer_block.parts >= block.parts for peer_block in peer_blocks):
                        return False
        return True

    # --- rank -------------------------------------------------------------------------------------------------------

    def determine(self, blocks: Sequence[Block], unknowns: Sequence[int]) -> bool:
        """Tells whether blocks determine all unknowns."""
        return rank(matrix(blocks, unknowns)) == len(unknowns)

    def decodable(self, kind: Kind) -> bool:
        """Tells whether the answers of devices that are heard determine a product."""
        if kind == "rows":
            return self.determine(self.there(kind), self.unknowns(kind))
        return self.determine(self.answering(kind), self.unknowns(kind))

    def trainable(self, partition: Partition, kinds: Sequence[Kind]) -> bool:
        """Tells whether a partition can be trained on: enough blocks of columns have its rows."""
        if "columns" not in kinds:
            return self.raw(partition) is not None
        blocks = [block for block in self.there("columns") if partition.number in block.parts]
        return bool(self.bounds) and self.determine(blocks, self.unknowns("columns"))

    def recoverable(self, partition: Partition) -> bool:
        """Tells whether a partition follows from the blocks of rows that devices hold, silent ones too."""
        blocks = self.there("rows", silent=True)
        if any(block.raw == partition.number for block in blocks):
            return True
        unknowns = [candidate.number for candidate in self.partitions]
        return not _undetermined(blocks, unknowns, [partition.number])

    def missing(self, kind: Kind) -> list[int]:
        """Lists the unknowns that the answers of devices that are heard do not determine."""
        unknowns = self.unknowns(kind)
        return _undetermined(self.answering(kind), unknowns, unknowns)

    def redundancy(self, kind: Kind, most: int = 2) -> int:
        """Computes how many devices may vanish, in the worst case; -1: some are missing already.

        Args:
          kind: of product.
          most: the most losses that are tried.
        """
        unknowns, blocks = self.unknowns(kind), self.answering(kind)
        holders = [block.holder for block in blocks]
        return redundancy(matrix(blocks, unknowns), holders, enough=most)


def matrix(blocks: Sequence[Block], unknowns: Sequence[int]) -> Tensor:
    """Makes the coefficients of blocks, (blocks, unknowns)."""
    return torch.tensor(
        [[block.coefficients.get(unknown, 0.0) for unknown in unknowns] for block in blocks], dtype=torch.float64
    ).reshape(len(blocks), len(unknowns))


def _undetermined(blocks: Sequence[Block], unknowns: Sequence[int], among: Sequence[int]) -> list[int]:
    """Lists those of some unknowns that do not follow from blocks."""
    rows, eye = matrix(blocks, unknowns), torch.eye(len(unknowns), dtype=torch.float64)
    base_rank = rank(rows)
    return [unknown for unknown in among if rank(torch.cat([rows, eye[unknowns.index(unknown)][None]])) > base_rank]
