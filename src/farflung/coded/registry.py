"""The coordinator's state of members, partitions and blocks, with queries about rank."""

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
"""Kind of a block: for products with weights, or with residuals."""

_TRIES = 3
"""Number of consecutive failures after which a device gets no orders for a while."""


@dataclass(slots=True)
class Partition:
    """Samples that a device has brought.

    Args:
      number: Column of the code.
      name: Name given by the device.
      labels: Labels, (rows,) float64.
      block: Number of its raw block.
      is_active: True if it is trained on.
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
      number: Number of the block.
      kind: Rows or columns.
      coefficients: Coefficient of each partition, or of each column block, in it.
      holder: Rank of the device that holds it; ``None`` if that device is gone.
      is_ready: True if it is built.
      parts: Partitions whose rows are in a block of columns.
      pending_parts: Partitions whose rows are being fetched.
      replaced_block: Number of the block that this one makes obsolete.
      partial_holder: Rank of the device that has a part of it but could not complete it.
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
        """The single partition, or column block, that it copies; None if it is coded."""
        (entry, *extra) = self.coefficients.items()
        return entry[0] if not extra and entry[1] == 1.0 else None


@dataclass(slots=True)
class Member:
    """A device that takes part.

    Args:
      rank: Rank of the device.
      is_silent: True if it has missed a deadline and has not responded since.
      is_leaving: True if it has asked to leave.
      cannot_build: True if it failed to build a block for reasons of its own; it gets no further orders.
      failures: Number of consecutive orders that failed without progress.
      fetched_nbytes: Maximum size of the incomplete blocks since the last complete one.
    """

    rank: int
    silent: bool = False
    leaving: bool = False
    unable: bool = False
    failures: int = 0
    fetched_nbytes: int = 0

    @property
    def rests(self) -> bool:
        """Returns True if the device gets no orders for a while after repeated failures."""
        return self.failures >= _TRIES

    @property
    def is_stuck(self) -> bool:
        """Returns True if its last two orders made no progress, so that it may fail forever."""
        return self.failures > 1

    def count_failure(self, fetched_nbytes: int) -> None:
        """Counts a failed order, unless it fetched more bytes than any failed one before.

        So a device stops counting as progress if one source answers it and another refuses.

        Args:
          fetched_nbytes: Number of bytes of the block that the device keeps.
        """
        self.failures = 0 if fetched_nbytes > self.fetched_nbytes else self.failures + 1
        self.fetched_nbytes = max(self.fetched_nbytes, fetched_nbytes)


@dataclass(frozen=True, slots=True)
class Placed:
    """A block that its holder is to build or extend.

    Args:
      block: State of the block.
      order: Order for the holder.
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
        """Number of columns of the data; 0 while unknown."""
        self.bounds: tuple[int, ...] = ()
        """Bounds of the column blocks, once training has its initial partitions."""

    # --- as a value -------------------------------------------------------------------------------------------------

    def tree(self) -> State:
        """Returns the state for a restart, without the holders of blocks, which devices report."""
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
        """Builds a registry without members from the result of :meth:`to_tree`."""
        registry = cls()
        registry.features, registry.bounds = tree["features"], tuple(tree["bounds"])
        for number, data in sorted(tree["partitions"].items(), key=lambda item: int(item[0])):
            partition = Partition(int(number), data["name"], data["labels"], data["block"], data["active"])
            registry.partitions.append(partition)
        for number, kind, coefficients, parts in tree["blocks"]:
            mix = {int(unknown): float(weight) for unknown, weight in coefficients}
            registry.blocks[number] = Block(number, kind, mix, None, parts=set(parts))
        return registry

    # --- changes ----------------------------------------------------------------------------------------------------

    def place(self, placed: Placed) -> None:
        """Adds a block that is being built."""
        block = placed.block
        self.blocks[block.number] = block
        if isinstance(placed.order, Columns):
            block.making.update(part.partition for part in placed.order.parts)

    def lose(self, rank: int) -> None:
        """Removes a device and its blocks."""
        self.members.pop(rank, None)
        for block in self.blocks.values():
            if block.holder == rank:
                self.discard(block)
            if block.begun_by == rank:
                block.begun_by = None

    def forsake(self, partition: Partition) -> None:
        """Deactivates a lost partition, and releases the blocks of rows that contain it."""
        for block in self.of("rows"):
            if partition.number in block.coefficients:
                self.discard(block)
        partition.active = False

    def discard(self, block: Block) -> None:
        """Removes the holder of a block; the coefficients stay known in case a device returns with it."""
        block.holder, block.ready = None, False
        block.making.clear()

    def built(self, block: Block, partitions: Iterable[int]) -> None:
        """Marks a block as built, or these parts of a block of columns; other orders may be in progress."""
        block.ready = True
        built_parts = block.making.intersection(partitions)
        block.parts |= built_parts
        block.making -= built_parts

    def failed(self, block: Block) -> None:
        """Cancels an order; a block that was ready stays as it was."""
        block.making.clear()
        if not block.ready:
            block.begun_by = block.holder if block.replaces is None else None
            self.discard(block)

    # --- members and partitions -------------------------------------------------------------------------------------

    @property
    def heard(self) -> list[int]:
        """Ranks that are not silent."""
        return sorted(rank for rank, member in self.members.items() if not member.silent)

    @property
    def hosts(self) -> list[int]:
        """Ranks that are neither silent nor leaving."""
        return [rank for rank in self.heard if not self.members[rank].leaving]

    @property
    def makers(self) -> list[int]:
        """Hosts that accept orders."""
        members = self.members
        return [rank for rank in self.hosts if not (members[rank].unable or members[rank].rests)]

    @property
    def active(self) -> list[Partition]:
        """Partitions that are trained on."""
        return [partition for partition in self.partitions if partition.active]

    @property
    def column_blocks(self) -> int:
        """Number of column blocks."""
        return len(self.bounds) - 1

    def named(self, name: str) -> Partition | None:
        """Finds a partition by its name."""
        return next((partition for partition in self.partitions if partition.name == name), None)

    def unknowns(self, kind: Kind) -> list[int]:
        """Lists the unknowns of decoding: active partitions, or column blocks."""
        if kind == "rows":
            return [partition.number for partition in self.active]
        return list(range(self.column_blocks))

    # --- blocks -----------------------------------------------------------------------------------------------------

    @property
    def next_number(self) -> int:
        """Number for a new block; blocks without a holder keep theirs."""
        return max(self.blocks, default=-1) + 1

    def of(self, kind: Kind) -> list[Block]:
        """Lists the blocks of a kind that have a holder, built or not."""
        return [block for block in self.blocks.values() if block.kind == kind and block.holder is not None]

    def begun(self, kind: Kind, rank: int | None) -> list[Block]:
        """Lists the blocks of a kind of which a device has a part that it could not complete."""
        blocks = self.blocks.values()
        return [block for block in blocks if block.kind == kind and block.begun_by == rank is not None]

    def there(self, kind: Kind, *, silent: bool = False) -> list[Block]:
        """Lists the built blocks of responsive devices, or of silent ones too."""
        ranks = set(self.members) if silent else set(self.heard)
        return [block for block in self.of(kind) if block.ready and block.holder in ranks]

    def answering(self, kind: Kind) -> list[Block]:
        """Lists the blocks whose answers are products of all active partitions."""
        active = {partition.number for partition in self.active}
        if kind == "rows":
            return [block for block in self.there(kind) if active.issuperset(block.coefficients)]
        return [block for block in self.there(kind) if active.issubset(block.parts)]

    def raw(self, partition: Partition) -> Block | None:
        """Finds the raw block of a partition on a responsive device."""
        return next((block for block in self.there("rows") if block.raw == partition.number), None)

    def making(self) -> list[Block]:
        """Lists the blocks that responsive devices are building."""
        ranks = self.heard
        return [
            block
            for block in self.blocks.values()
            if block.holder in ranks and (not block.ready or block.making)
        ]

    def can_go(self, rank: int) -> bool:
        """Returns True if other devices hold all raw blocks of a device."""
        for kind in ("rows", "columns"):
            ready_blocks = self.there(kind)
            peer_blocks = [block for block in ready_blocks if block.holder != rank]
            for block in ready_blocks:
                if block.holder == rank and block.raw is not None:
                    if not any(copy.raw == block.raw and copy.parts >= block.parts for copy in peer_blocks):
                        return False
        return True

    # --- rank -------------------------------------------------------------------------------------------------------

    def determine(self, blocks: Sequence[Block], unknowns: Sequence[int]) -> bool:
        """Returns True if blocks determine all unknowns."""
        return rank(matrix(blocks, unknowns)) == len(unknowns)

    def decodable(self, kind: Kind) -> bool:
        """Returns True if the answers of responsive devices determine a product."""
        if kind == "rows":
            return self.determine(self.there(kind), self.unknowns(kind))
        return self.determine(self.answering(kind), self.unknowns(kind))

    def trainable(self, partition: Partition, kinds: Sequence[Kind]) -> bool:
        """Returns True if enough blocks contain the rows of a partition to train on it."""
        if "columns" not in kinds:
            return self.raw(partition) is not None
        blocks = [block for block in self.there("columns") if partition.number in block.parts]
        return bool(self.bounds) and self.determine(blocks, self.unknowns("columns"))

    def recoverable(self, partition: Partition) -> bool:
        """Returns True if blocks of rows determine a partition, those of silent devices included."""
        blocks = self.there("rows", silent=True)
        if any(block.raw == partition.number for block in blocks):
            return True
        unknowns = [candidate.number for candidate in self.partitions]
        return not _undetermined(blocks, unknowns, [partition.number])

    def missing(self, kind: Kind) -> list[int]:
        """Lists the unknowns that the answers of responsive devices do not determine."""
        unknowns = self.unknowns(kind)
        return _undetermined(self.answering(kind), unknowns, unknowns)

    def redundancy(self, kind: Kind, most: int = 2) -> int:
        """Computes the number of devices that may vanish, in the worst case; -1 if some are missing already.

        Args:
          kind: Kind of product.
          max_losses: Maximum number of losses to test.
        """
        unknowns, blocks = self.unknowns(kind), self.answering(kind)
        holders = [block.holder for block in blocks]
        return redundancy(matrix(blocks, unknowns), holders, enough=most)


def matrix(blocks: Sequence[Block], unknowns: Sequence[int]) -> Tensor:
    """Builds the matrix of coefficients, (blocks, unknowns)."""
    return torch.tensor(
        [[block.coefficients.get(k, 0.0) for k in unknowns] for block in blocks], dtype=torch.float64
    ).reshape(len(blocks), len(unknowns))


def _undetermined(blocks: Sequence[Block], unknowns: Sequence[int], among: Sequence[int]) -> list[int]:
    rows, eye = matrix(blocks, unknowns), torch.eye(len(unknowns), dtype=torch.float64)
    base_rank = rank(rows)
    return [k for k in among if rank(torch.cat([rows, eye[unknowns.index(k)][None]])) > base_rank]
