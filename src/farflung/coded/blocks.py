r"""Blocks of a device, and their products piece by piece.

With :math:`K` partitions :math:`X_k` of rows, a block of rows is :math:`\sum_k G_{jk} X_k`, and a raw one is a
partition itself. If the same data are cut in blocks :math:`C_k` of columns, a block of columns is
:math:`\sum_k G'_{jk} C_k`. It is stored by partition, since each part comes from another device, and
transposed, so that a piece of it is contiguous.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from farflung.coded.messages import Fetch, MalformedMessage, Multiply
from farflung.errors import ConfigError

__all__ = [
    "MAX_PIECES",
    "BlockStore",
    "ColumnBlock",
    "DataBlock",
    "Draft",
    "RowBlock",
    "are_bounds_valid",
    "compute_column_bounds",
    "compute_max_width",
    "compute_piece_bounds",
    "count_chunk_rows",
    "sum_column_blocks",
]

MAX_PIECES = 1 << 12
"""Maximum number of pieces of a product."""
_MAX_NBYTES = 1 << 31
"""Maximum size of a message."""
_MAX_NAME_LENGTH = 200
Term: TypeAlias = tuple[int, float]
"""Term of a sum of blocks: the number of a block, and its weight."""
MAX_CHUNK_NBYTES = 1 << 20
"""Maximum size of one answer to a fetch, as blocks may exceed the free memory."""


def compute_piece_bounds(length: int, pieces: int, piece: int) -> tuple[int, int]:
    """Computes where a piece begins and ends.

    >>> [compute_piece_bounds(10, 4, piece) for piece in range(4)]
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    return piece * length // pieces, (piece + 1) * length // pieces


def compute_column_bounds(features: int, blocks: int) -> tuple[int, ...]:
    """Computes the bounds of column blocks, which have equal widths except for the last ones.

    >>> compute_column_bounds(7, 3)
    (0, 3, 6, 7)
    """
    width = -(-features // blocks)
    return tuple(min(features, block * width) for block in range(blocks + 1))


def sum_column_blocks(rows: Tensor, weights: Sequence[float], bounds: Sequence[int]) -> Tensor:
    """Sums weighted column blocks of some rows, transposed.

    Args:
      rows: Rows to sum, (rows, features).
      weights: Weight of each column block.
      bounds: First column of each block, and the end of the last one.

    Returns:
      (width, rows), with the width of the widest weighted block; narrower ones are padded with zeros.
    """
    total = torch.zeros(compute_max_width(weights, bounds), rows.shape[0], dtype=torch.float64)
    for k, weight in enumerate(weights):
        if weight:
            begin, end = bounds[k], bounds[k + 1]
            total[: end - begin].add_(rows[:, begin:end].T, alpha=weight)
    return total


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of rows or of columns, raw or coded.

    Args:
      features: Number of columns of the whole data.
      parts: Entries by partition; see the subclasses.
    """

    features: int
    parts: dict[int, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


class RowBlock(_Block):
    """A block of rows, in a single part with the number -1, (rows, features)."""

    @classmethod
    def from_tensor(cls, data: Tensor) -> RowBlock:
        return cls(data.shape[1], {-1: data})

    def count_operand_rows(self, task: Multiply) -> int | None:
        """Returns the required rows of the operand; None if the block lacks data of the task."""
        return len(task.operand) if task.partitions else self.features

    def count_samples(self, begin: int, end: int, task: Multiply) -> int:
        """Computes the number of samples equivalent to the multiplied entries."""
        if not task.partitions:
            return len(self.parts[-1][begin:end])
        return -(-self.parts[-1][: len(task.operand), begin:end].numel() // self.features)

    def multiply(self, begin: int, end: int, task: Multiply) -> Tensor:
        """Multiplies rows by weights, or columns ``begin`` to ``end`` by the residuals of one partition.

        If block and residuals differ in height, both are cut to the lower one.
        """
        data = self.parts[-1]
        if not task.partitions:
            return data[begin:end] @ task.operand
        rows = min(len(data), len(task.operand))
        return data[:rows, begin:end].T @ task.operand[:rows]

    def get_width(self, request: Fetch) -> int | None:
        """Returns the width of the requested rows; None if the block has no such rows."""
        if request.partition >= 0:
            return None
        if not request.weights:
            return self.features
        is_fitting = are_bounds_valid(request.weights, request.bounds, self.features)
        return compute_max_width(request.weights, request.bounds) if is_fitting else None

    def read_rows(self, request: Fetch) -> Tensor:
        """Reads rows, or the transposed sums of their columns."""
        rows = self.parts[-1][request.begin : request.end]
        return sum_column_blocks(rows, request.weights, request.bounds) if request.weights else rows

    def slice_rows(self, partition: int, begin: int, end: int) -> Tensor:
        """Returns a view of some rows of a partition."""
        return self.parts[partition][begin:end]


class ColumnBlock(_Block):
    """A block of columns, with a part of shape (width, rows) for each partition."""

    def count_operand_rows(self, task: Multiply) -> int | None:
        if not task.partitions or not self.parts.keys() >= set(task.partitions):
            return None
        return sum(self.parts[partition].shape[1] for partition in task.partitions)

    def count_samples(self, begin: int, end: int, task: Multiply) -> int:
        return -(-sum(self.parts[number][begin:end].numel() for number in task.partitions) // self.features)

    def multiply(self, begin: int, end: int, task: Multiply) -> Tensor:
        """Multiplies columns by the residuals of the partitions in the operand."""
        parts = [self.parts[partition] for partition in task.partitions]
        operands = task.operand.split([part.shape[1] for part in parts])
        products: list[Tensor] = [
            part[begin:end] @ operand for part, operand in zip(parts, operands, strict=True)
        ]
        total = products.pop(0)
        for product in products:
            total += product
        return total

    def get_width(self, request: Fetch) -> int | None:
        part = self.parts.get(request.partition)
        return None if part is None else len(part)

    def read_rows(self, request: Fetch) -> Tensor:
        return self.slice_rows(request.partition, request.begin, request.end).contiguous()

    def slice_rows(self, partition: int, begin: int, end: int) -> Tensor:
        return self.parts[partition][:, begin:end]


DataBlock: TypeAlias = RowBlock | ColumnBlock


@dataclass(slots=True)
class Draft:
    """An incomplete block: its sums are kept for the next order of the same block.

    Args:
      block: Sums so far.
      sums: Terms of each sum of rows, and those still missing, by partition and first row.
      fetched_nbytes: Number of bytes that other devices have sent for it.
    """

    block: DataBlock
    sums: dict[tuple[int, int], tuple[frozenset[Term], set[Term]]] = field(default_factory=dict)
    fetched_nbytes: int = 0

    def find_missing_terms(
        self, partition: int, begin: int, terms: frozenset[Term], target: Tensor
    ) -> set[Term]:
        """Returns the terms that have to be added to some rows.

        The content of a block does not depend on its terms. So complete rows stay, and incomplete ones start
        again if the order has other terms now.

        Args:
          partition: Partition of a block of columns; -1 for a block of rows.
          begin: First row.
          terms: Terms of the sum in the current order.
          target: View of the rows.
        """
        previous_terms, missing = self.sums.get((partition, begin), (None, set(terms)))
        if previous_terms != terms and missing:
            target.zero_()
            missing = set(terms)
            self.sums[partition, begin] = terms, missing
        return missing


class BlockStore:
    """Data and blocks of a device, which outlast its connection to a coordinator.

    Args:
      partition: Name of the device's data; empty without data.
      data: Data of the device, (rows, features) float64.
      labels: Labels of the data, (rows,) float64.

    Raises:
      ConfigError: the name is not printable, or too long.
    """

    def __init__(self, partition: str = "", data: Tensor | None = None, labels: Tensor | None = None) -> None:
        if not partition.isprintable() or len(partition) > _MAX_NAME_LENGTH:
            raise ConfigError(
                f"partition {partition[:_MAX_NAME_LENGTH]!r}: give it a name of at most {_MAX_NAME_LENGTH} "
                f"printable characters"
            )
        self.partition, self.data, self.labels = partition, data, labels
        self.raw_number = -1
        """Block number of the device's own data."""
        self.run = ""
        """Run to which the block numbers belong."""
        self.blocks: dict[int, DataBlock] = {}
        self.drafts: dict[int, Draft] = {}
        """Incomplete blocks, by number."""

    @property
    def coded_blocks(self) -> tuple[int, ...]:
        """Numbers of the blocks that the device has built."""
        return tuple(sorted(self.blocks.keys() - {self.raw_number}))

    @property
    def nbytes(self) -> int:
        drafts = (draft.block for draft in self.drafts.values())
        return sum(block.nbytes for block in (*self.blocks.values(), *drafts))

    def bind_run(self, run: str, raw: int) -> None:
        """Sets the run and the block number of the own data; drops the blocks of another run."""
        if run != self.run:
            self.blocks.clear()
            self.drafts.clear()
        self.blocks.pop(self.raw_number, None)
        self.run, self.raw_number = run, raw
        if self.data is not None and raw >= 0:
            self.blocks[raw] = RowBlock.from_tensor(self.data)

    def store_block(self, number: int, block: DataBlock) -> None:
        """Stores a built block; parts of a block of columns are merged with those present."""
        old_block = self.blocks.get(number)
        if old_block is not None:
            block = replace(block, parts={**old_block.parts, **block.parts})
        self.blocks[number] = block

    def drop_block(self, block: int) -> None:
        """Removes a block that is no longer needed."""
        if block != self.raw_number:
            self.blocks.pop(block, None)
            self.drafts.pop(block, None)

    def select_blocks(self, task: Multiply) -> Mapping[int, DataBlock]:
        """Returns the stored blocks of a task that can be multiplied.

        Raises:
          MalformedMessage: the operand has the wrong size, or the product exceeds the largest message.
        """
        if task.operand.dim() != 2:
            raise MalformedMessage("an operand that is not a matrix")
        if task.length < 1 or not 1 <= task.pieces <= MAX_PIECES:
            raise MalformedMessage("a number of pieces out of range")
        if 8 * task.operand.shape[1] * -(-task.length // task.pieces) > _MAX_NBYTES:
            raise MalformedMessage("a piece larger than any message")
        selected = {}
        for number in task.blocks:
            block = self.blocks.get(number)  # blocks may be dropped at any time
            num_rows = None if block is None else block.count_operand_rows(task)
            if block is None or num_rows is None:
                continue
            if task.operand.shape[0] != num_rows:
                raise MalformedMessage(f"an operand of {list(task.operand.shape)} for a block of {num_rows}")
            selected[number] = block
        return selected

    def read_rows(self, request: Fetch) -> Tensor:
        """Reads rows that another device has requested.

        Raises:
          MalformedMessage: there is no such block or part, or the request exceeds one chunk.
        """
        block = self.blocks.get(request.block)
        width = None if block is None else block.get_width(request)
        if block is None or width is None or not 0 <= request.begin <= request.end:
            raise MalformedMessage("no such part of a block")
        if request.end - request.begin > count_chunk_rows(width):
            raise MalformedMessage("more rows than are given at once")
        return block.read_rows(request)


def count_chunk_rows(width: int) -> int:
    """Computes the number of rows of a width that fit into one chunk."""
    return max(1, MAX_CHUNK_NBYTES // (8 * max(1, width)))


def compute_max_width(weights: Sequence[float], bounds: Sequence[int]) -> int:
    """Computes the largest width of the column blocks with a weight."""
    return max((bounds[k + 1] - bounds[k] for k, weight in enumerate(weights) if weight), default=0)


def are_bounds_valid(weights: Sequence[float], bounds: Sequence[int], features: int) -> bool:
    """Returns True if bounds divide the features into one column block per weight."""
    ascending = all(0 <= begin <= end for begin, end in itertools.pairwise(bounds))
    return len(bounds) == len(weights) + 1 and ascending and bounds[0] == 0 and bounds[-1] == features
