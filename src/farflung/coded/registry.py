"""The coordinator's state of members, partitions and blocks, with queries about rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from farflung.coded.codes import compute_rank, compute_redundancy
from farflung.coded.messages import Columns, Rows
from farflung.types import State

__all__ = ["Block", "BlockRegistry", "DevicePartition", "DeviceState", "Kind", "PlacedBlock", "build_matrix"]

Kind = Literal["rows", "columns"]
"""Kind of a block: for products with weights, or with residuals."""

_MAX_FAILURES = 3
"""Number of consecutive failures after which a device gets no orders for a while."""


@dataclass(slots=True)
class DevicePartition:
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
    is_active: bool = False

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
    is_ready: bool = False
    parts: set[int] = field(default_factory=set)
    pending_parts: set[int] = field(default_factory=set)
    replaced_block: int | None = None
    partial_holder: int | None = None

    @property
    def raw_unknown(self) -> int | None:
        """The single partition, or column block, that it copies; None if it is coded."""
        (entry, *extra) = self.coefficients.items()
        return entry[0] if not extra and entry[1] == 1.0 else None


@dataclass(slots=True)
class DeviceState:
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
    is_silent: bool = False
    is_leaving: bool = False
    cannot_build: bool = False
    failures: int = 0
    fetched_nbytes: int = 0

    @property
    def is_backing_off(self) -> bool:
        """Returns True if the device gets no orders for a while after repeated failures."""
        return self.failures >= _MAX_FAILURES

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
class PlacedBlock:
    """A block that its holder is to build or extend.

    Args:
      block: State of the block.
      order: Order for the holder.
    """

    block: Block
    order: Rows | Columns


class BlockRegistry:
    """Members, partitions and blocks."""

    def __init__(self) -> None:
        self.devices: dict[int, DeviceState] = {}
        self.partitions: list[DevicePartition] = []
        self.blocks: dict[int, Block] = {}
        self.features = 0
        """Number of columns of the data; 0 while unknown."""
        self.bounds: tuple[int, ...] = ()
        """Bounds of the column blocks, once training has its initial partitions."""

    # --- as a value -------------------------------------------------------------------------------------------------

    def to_tree(self) -> State:
        """Returns the state for a restart, without the holders of blocks, which devices report."""
        return {
            "features": self.features,
            "bounds": list(self.bounds),
            "partitions": {
                str(partition.number): {
                    "name": partition.name,
                    "block": partition.block,
                    "is_active": partition.is_active,
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
    def from_tree(cls, tree: State) -> BlockRegistry:
        """Builds a registry without members from the result of :meth:`to_tree`."""
        registry = cls()
        registry.features, registry.bounds = tree["features"], tuple(tree["bounds"])
        for number, data in sorted(tree["partitions"].items(), key=lambda item: int(item[0])):
            partition = DevicePartition(
                int(number), data["name"], data["labels"], data["block"], data["is_active"]
            )
            registry.partitions.append(partition)
        for number, kind, coefficients, parts in tree["blocks"]:
            mix = {int(unknown): float(weight) for unknown, weight in coefficients}
            registry.blocks[number] = Block(number, kind, mix, None, parts=set(parts))
        return registry

    # --- changes ----------------------------------------------------------------------------------------------------

    def add_block(self, placed_block: PlacedBlock) -> None:
        """Adds a block that is being built."""
        block = placed_block.block
        self.blocks[block.number] = block
        if isinstance(placed_block.order, Columns):
            block.pending_parts.update(part.partition for part in placed_block.order.parts)

    def remove_device(self, rank: int) -> None:
        """Removes a device and its blocks."""
        self.devices.pop(rank, None)
        for block in self.blocks.values():
            if block.holder == rank:
                self.release_block(block)
            if block.partial_holder == rank:
                block.partial_holder = None

    def drop_partition(self, partition: DevicePartition) -> None:
        """Deactivates a lost partition, and releases the blocks of rows that contain it."""
        for block in self.list_blocks("rows"):
            if partition.number in block.coefficients:
                self.release_block(block)
        partition.is_active = False

    def release_block(self, block: Block) -> None:
        """Removes the holder of a block; the coefficients stay known in case a device returns with it."""
        block.holder, block.is_ready = None, False
        block.pending_parts.clear()

    def mark_built(self, block: Block, partitions: Iterable[int]) -> None:
        """Marks a block as built, or these parts of a block of columns; other orders may be in progress."""
        block.is_ready = True
        built_parts = block.pending_parts.intersection(partitions)
        block.parts |= built_parts
        block.pending_parts -= built_parts

    def mark_failed(self, block: Block) -> None:
        """Cancels an order; a block that was ready stays as it was."""
        block.pending_parts.clear()
        if not block.is_ready:
            block.partial_holder = block.holder if block.replaced_block is None else None
            self.release_block(block)

    # --- members and partitions -------------------------------------------------------------------------------------

    @property
    def responsive_ranks(self) -> list[int]:
        """Ranks that are not silent."""
        return sorted(rank for rank, member in self.devices.items() if not member.is_silent)

    @property
    def host_ranks(self) -> list[int]:
        """Ranks that are neither silent nor leaving."""
        return [rank for rank in self.responsive_ranks if not self.devices[rank].is_leaving]

    @property
    def builder_ranks(self) -> list[int]:
        """Hosts that accept orders."""
        members = self.devices
        return [
            rank
            for rank in self.host_ranks
            if not (members[rank].cannot_build or members[rank].is_backing_off)
        ]

    @property
    def active_partitions(self) -> list[DevicePartition]:
        """Partitions that are trained on."""
        return [partition for partition in self.partitions if partition.is_active]

    @property
    def num_column_blocks(self) -> int:
        """Number of column blocks."""
        return len(self.bounds) - 1

    def find_partition(self, name: str) -> DevicePartition | None:
        """Finds a partition by its name."""
        return next((partition for partition in self.partitions if partition.name == name), None)

    def list_unknowns(self, kind: Kind) -> list[int]:
        """Lists the unknowns of decoding: active partitions, or column blocks."""
        if kind == "rows":
            return [partition.number for partition in self.active_partitions]
        return list(range(self.num_column_blocks))

    # --- blocks -----------------------------------------------------------------------------------------------------

    @property
    def new_block_number(self) -> int:
        """Number for a new block; blocks without a holder keep theirs."""
        return max(self.blocks, default=-1) + 1

    def list_blocks(self, kind: Kind) -> list[Block]:
        """Lists the blocks of a kind that have a holder, built or not."""
        return [block for block in self.blocks.values() if block.kind == kind and block.holder is not None]

    def list_partial_blocks(self, kind: Kind, rank: int | None) -> list[Block]:
        """Lists the blocks of a kind of which a device has a part that it could not complete."""
        blocks = self.blocks.values()
        return [block for block in blocks if block.kind == kind and block.partial_holder == rank is not None]

    def list_ready_blocks(self, kind: Kind, *, include_silent: bool = False) -> list[Block]:
        """Lists the built blocks of responsive devices, or of silent ones too."""
        ranks = set(self.devices) if include_silent else set(self.responsive_ranks)
        return [block for block in self.list_blocks(kind) if block.is_ready and block.holder in ranks]

    def list_product_blocks(self, kind: Kind) -> list[Block]:
        """Lists the blocks whose answers are products of all active partitions."""
        active = {partition.number for partition in self.active_partitions}
        if kind == "rows":
            return [block for block in self.list_ready_blocks(kind) if active.issuperset(block.coefficients)]
        return [block for block in self.list_ready_blocks(kind) if active.issubset(block.parts)]

    def find_raw_block(self, partition: DevicePartition) -> Block | None:
        """Finds the raw block of a partition on a responsive device."""
        return next(
            (block for block in self.list_ready_blocks("rows") if block.raw_unknown == partition.number), None
        )

    def list_pending_blocks(self) -> list[Block]:
        """Lists the blocks that responsive devices are building."""
        ranks = self.responsive_ranks
        return [
            block
            for block in self.blocks.values()
            if block.holder in ranks and (not block.is_ready or block.pending_parts)
        ]

    def can_leave(self, rank: int) -> bool:
        """Returns True if other devices hold all raw blocks of a device."""
        for kind in ("rows", "columns"):
            ready_blocks = self.list_ready_blocks(kind)
            peer_blocks = [block for block in ready_blocks if block.holder != rank]
            for block in ready_blocks:
                if block.holder == rank and block.raw_unknown is not None:
                    if not any(
                        copy.raw_unknown == block.raw_unknown and copy.parts >= block.parts
                        for copy in peer_blocks
                    ):
                        return False
        return True

    # --- rank -------------------------------------------------------------------------------------------------------

    def has_full_rank(self, blocks: Sequence[Block], unknowns: Sequence[int]) -> bool:
        """Returns True if blocks determine all unknowns."""
        return compute_rank(build_matrix(blocks, unknowns)) == len(unknowns)

    def is_decodable(self, kind: Kind) -> bool:
        """Returns True if the answers of responsive devices determine a product."""
        if kind == "rows":
            return self.has_full_rank(self.list_ready_blocks(kind), self.list_unknowns(kind))
        return self.has_full_rank(self.list_product_blocks(kind), self.list_unknowns(kind))

    def is_trainable(self, partition: DevicePartition, kinds: Sequence[Kind]) -> bool:
        """Returns True if enough blocks contain the rows of a partition to train on it."""
        if "columns" not in kinds:
            return self.find_raw_block(partition) is not None
        blocks = [block for block in self.list_ready_blocks("columns") if partition.number in block.parts]
        return bool(self.bounds) and self.has_full_rank(blocks, self.list_unknowns("columns"))

    def is_recoverable(self, partition: DevicePartition) -> bool:
        """Returns True if blocks of rows determine a partition, those of silent devices included."""
        blocks = self.list_ready_blocks("rows", include_silent=True)
        if any(block.raw_unknown == partition.number for block in blocks):
            return True
        unknowns = [candidate.number for candidate in self.partitions]
        return not _list_undetermined(blocks, unknowns, [partition.number])

    def list_undetermined(self, kind: Kind) -> list[int]:
        """Lists the unknowns that the answers of responsive devices do not determine."""
        unknowns = self.list_unknowns(kind)
        return _list_undetermined(self.list_product_blocks(kind), unknowns, unknowns)

    def compute_redundancy(self, kind: Kind, max_losses: int = 2) -> int:
        """Computes the number of devices that may vanish, in the worst case; -1 if some are missing already.

        Args:
          kind: Kind of product.
          max_losses: Maximum number of losses to test.
        """
        unknowns, blocks = self.list_unknowns(kind), self.list_product_blocks(kind)
        holders = [block.holder for block in blocks]
        return compute_redundancy(build_matrix(blocks, unknowns), holders, max_losses=max_losses)


def build_matrix(blocks: Sequence[Block], unknowns: Sequence[int]) -> Tensor:
    """Builds the matrix of coefficients, (blocks, unknowns)."""
    return torch.tensor(
        [[block.coefficients.get(k, 0.0) for k in unknowns] for block in blocks], dtype=torch.float64
    ).reshape(len(blocks), len(unknowns))


def _list_undetermined(
    blocks: Sequence[Block], unknowns: Sequence[int], candidates: Sequence[int]
) -> list[int]:
    rows, eye = build_matrix(blocks, unknowns), torch.eye(len(unknowns), dtype=torch.float64)
    base_rank = compute_rank(rows)
    return [
        k for k in candidates if compute_rank(torch.cat([rows, eye[unknowns.index(k)][None]])) > base_rank
    ]
