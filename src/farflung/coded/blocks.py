r"""The blocks of a device, and their products, piece by piece.

With :math:`K` partitions :math:`X_k` of rows, a block of rows is :math:`\\sum_k G_{jk} X_k`, and a raw one is a
partition itself. With the same data cut in blocks :math:`C_k` of columns, a block of columns is :math:`\\sum_k G'_{jk}
C_k`. It is kept by partition, as each part comes from another device, and transposed, so that a piece of it lies in one
place.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from farflung.coded.messages import Fetch, Malformed, Multiply
from farflung.errors import ConfigError

__all__ = [
    "MAX_PIECES",
    "ColumnBlock",
    "Draft",
    "HeldBlock",
    "Holding",
    "RowBlock",
    "bounds_of",
    "column_sums",
    "fit",
    "piece_of",
    "rows_at_once",
    "widest",
]

MAX_PIECES = 1 << 12
"""The most pieces of a product."""
_MAX_NBYTES = 1 << 31
"""Of a message."""
_MAX_NAME = 200
Term: TypeAlias = tuple[int, float]
"""A block that is added to another one, by number, and its weight."""
CHUNK_NBYTES = 1 << 20
"""The most that one device gives another at once; a block may be larger than the memory that is left beside it."""


def piece_of(length: int, pieces: int, piece: int) -> tuple[int, int]:
    """Computes where a piece begins and ends.

    >>> [piece_of(10, 4, piece) for piece in range(4)]
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    return piece * length // pieces, (piece + 1) * length // pieces


def bounds_of(features: int, blocks: int) -> tuple[int, ...]:
    """Computes where column blocks begin, all but the last ones of one width, and where the last ends.

    >>> bounds_of(7, 3)
    (0, 3, 6, 7)
    """
    width = -(-features // blocks)
    return tuple(min(features, block * width) for block in range(blocks + 1))


def column_sums(rows: Tensor, weights: Sequence[float], bounds: Sequence[int]) -> Tensor:
    """Sums weighted column blocks of some rows, transposed.

    Args:
      rows: (rows, features).
      weights: of each column block.
      bounds: where each begins, and the last ends.

    Returns:
      (width, rows), the width that of the widest block with a weight; narrower ones count as if zeros followed.
    """
    total = torch.zeros(widest(weights, bounds), rows.shape[0], dtype=torch.float64)
    for k, weight in enumerate(weights):
        if weight:
            begin, end = bounds[k], bounds[k + 1]
            total[: end - begin].add_(rows[:, begin:end].T, alpha=weight)
    return total


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of rows or of columns, raw or coded.

    Args:
      features: of the whole data.
      parts: its numbers, by partition; see the subclasses.
    """

    features: int
    parts: dict[int, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


class RowBlock(_Block):
    """A block of rows: one part of the number -1, (rows, features)."""

    @classmethod
    def of(cls, data: Tensor) -> RowBlock:
        return cls(data.shape[1], {-1: data})

    def operand_rows(self, task: Multiply) -> int | None:
        """Returns the rows of the operand that it can be multiplied by; None: it lacks what the task is about."""
        return len(task.operand) if task.partitions else self.features

    def samples(self, begin: int, end: int, task: Multiply) -> int:
        """Computes the number of samples that have as many numbers as are multiplied."""
        if not task.partitions:
            return len(self.parts[-1][begin:end])
        return -(-self.parts[-1][: len(task.operand), begin:end].numel() // self.features)

    def multiply(self, begin: int, end: int, task: Multiply) -> Tensor:
        """Multiplies rows by the weights in the operand; or columns by the residuals of one partition there.

        Of the block and the residuals the higher one counts as if it ended with the other.
        """
        data = self.parts[-1]
        if not task.partitions:
            return data[begin:end] @ task.operand
        rows = min(len(data), len(task.operand))
        return data[:rows, begin:end].T @ task.operand[:rows]

    def width(self, request: Fetch) -> int | None:
        """Returns the width of the rows that are asked for; None: it has none of that kind."""
        if request.partition >= 0:
            return None
        if not request.weights:
            return self.features
        is_fitting = fit(request.weights, request.bounds, self.features)
        return widest(request.weights, request.bounds) if is_fitting else None

    def give(self, request: Fetch) -> Tensor:
        """Gives rows, or the sums of their columns, transposed."""
        rows = self.parts[-1][request.begin : request.end]
        return column_sums(rows, request.weights, request.bounds) if request.weights else rows

    def stretch(self, partition: int, begin: int, end: int) -> Tensor:
        """Returns the place of some rows of a partition in it."""
        return self.parts[partition][begin:end]


class ColumnBlock(_Block):
    """A block of columns: (width, rows) of each partition."""

    def operand_rows(self, task: Multiply) -> int | None:
        if not task.partitions or not self.parts.keys() >= set(task.partitions):
            return None
        return sum(self.parts[partition].shape[1] for partition in task.partitions)

    def samples(self, begin: int, end: int, task: Multiply) -> int:
        return -(-sum(self.parts[partition][begin:end].numel() for partition in task.partitions) // self.features)

    def multiply(self, begin: int, end: int, task: Multiply) -> Tensor:
        """Multiplies columns by the residuals in the operand; those partitions count whose parts are here."""
        parts = [self.parts[partition] for partition in task.partitions]
        operands = task.operand.split([part.shape[1] for part in parts])
        products: list[Tensor] = [
            part[begin:end] @ operand for part, operand in zip(parts, operands, strict=True)
        ]
        total = products.pop(0)
        for product in products:
            total += product
        return total

    def width(self, request: Fetch) -> int | None:
        part = self.parts.get(request.partition)
        return None if part is None else len(part)

    def give(self, request: Fetch) -> Tensor:
        return self.stretch(request.partition, request.begin, request.end).contiguous()

    def stretch(self, partition: int, begin: int, end: int) -> Tensor:
        return self.parts[partition][:, begin:end]


HeldBlock: TypeAlias = RowBlock | ColumnBlock


@dataclass(slots=True)
class Draft:
    """A block that is not whole: what has been added to it is kept for the next order of the same block.

    Args:
      block: the sums so far.
      sums: of each stretch of rows, the terms of its sum and those that are missing, by partition and first row.
      fetched_nbytes: that other devices gave for it.
    """

    block: HeldBlock
    sums: dict[tuple[int, int], tuple[frozenset[Term], set[Term]]] = field(default_factory=dict)
    fetched_nbytes: int = 0

    def missing(self, partition: int, begin: int, terms: frozenset[Term], into: Tensor) -> set[Term]:
        """Returns the terms that are to be added to a stretch of rows.

        A block has one content, whatever its terms are. So a stretch that is whole stays. One that is not begins anew
        where its sum has other terms now.

        Args:
          partition: of a block of columns; -1: it is one of rows.
          begin: the first row.
          terms: of the sum, as ordered now.
          into: the stretch.
        """
        earlier, missing = self.sums.get((partition, begin), (None, set(terms)))
        if earlier != terms and missing:
            into.zero_()
            missing = set(terms)
            self.sums[partition, begin] = terms, missing
        return missing


class Holding:
    """The data and blocks of a device; they outlast its connection to a coordinator.

    Args:
      partition: the name of the data that it brings; empty: none.
      data: (rows, features) float64.
      labels: (rows,) float64.

    Raises:
      ConfigError: the name is not printable, or too long.
    """

    def __init__(self, partition: str = "", data: Tensor | None = None, labels: Tensor | None = None) -> None:
        if not partition.isprintable() or len(partition) > _MAX_NAME:
            raise ConfigError(
                f"partition {partition[:_MAX_NAME]!r}: give it a name of at most {_MAX_NAME} printable characters"
            )
        self.partition, self.data, self.labels = partition, data, labels
        self.raw = -1
        """The number of its own data as a block."""
        self.run = ""
        """The run that the numbers of blocks are of."""
        self.blocks: dict[int, HeldBlock] = {}
        self.drafts: dict[int, Draft] = {}
        """The blocks that could not be made, by number."""

    @property
    def coded(self) -> tuple[int, ...]:
        """The blocks that it has made."""
        return tuple(sorted(self.blocks.keys() - {self.raw}))

    @property
    def nbytes(self) -> int:
        drafts = (draft.block for draft in self.drafts.values())
        return sum(block.nbytes for block in (*self.blocks.values(), *drafts))

    def settle(self, run: str, raw: int) -> None:
        """Takes a run's number for its own data; blocks of another run are dropped."""
        if run != self.run:
            self.blocks.clear()
            self.drafts.clear()
        self.blocks.pop(self.raw, None)
        self.run, self.raw = run, raw
        if self.data is not None and raw >= 0:
            self.blocks[raw] = RowBlock.of(self.data)

    def keep(self, number: int, block: HeldBlock) -> None:
        """Takes in a block that is made; parts of a block of columns join those that are there."""
        before = self.blocks.get(number)
        if before is not None:
            block = replace(block, parts={**before.parts, **block.parts})
        self.blocks[number] = block

    def drop(self, block: int) -> None:
        """Removes a block that is not needed any more."""
        if block != self.raw:
            self.blocks.pop(block, None)
            self.drafts.pop(block, None)

    def answering(self, task: Multiply) -> Mapping[int, HeldBlock]:
        """Finds the blocks of a task that are here and can be multiplied.

        Raises:
          Malformed: the operand is not of their size, or the product is larger than any message.
        """
        if task.operand.dim() != 2:
            raise Malformed("an operand that is not a matrix")
        if task.length < 1 or not 1 <= task.pieces <= MAX_PIECES:
            raise Malformed("a number of pieces out of range")
        if 8 * task.operand.shape[1] * -(-task.length // task.pieces) > _MAX_NBYTES:
            raise Malformed("a piece larger than any message")
        chosen = {}
        for number in task.blocks:
            block = self.blocks.get(number)  # blocks may go at any time
            due = None if block is None else block.operand_rows(task)
            if block is None or due is None:
                continue
            if task.operand.shape[0] != due:
                raise Malformed(f"an operand of {list(task.operand.shape)} for a block of {due}")
            chosen[number] = block
        return chosen

    def give(self, request: Fetch) -> Tensor:
        """Gives rows that another device asks for.

        Raises:
          Malformed: there is no such block, or no such part of it, or it is more than is given at once.
        """
        block = self.blocks.get(request.block)
        width = None if block is None else block.width(request)
        if block is None or width is None or not 0 <= request.begin <= request.end:
            raise Malformed("no such part of a block")
        if request.end - request.begin > rows_at_once(width):
            raise Malformed("more rows than are given at once")
        return block.give(request)


def rows_at_once(width: int) -> int:
    """Computes how many rows of a width are asked for at once; a device needs little memory beside its blocks."""
    return max(1, CHUNK_NBYTES // (8 * max(1, width)))


def widest(weights: Sequence[float], bounds: Sequence[int]) -> int:
    """Computes the largest width of the column blocks that have a weight."""
    return max((bounds[k + 1] - bounds[k] for k, weight in enumerate(weights) if weight), default=0)


def fit(weights: Sequence[float], bounds: Sequence[int], features: int) -> bool:
    """Tells whether these are the bounds of as many column blocks as there are weights, in so many columns."""
    ascending = all(0 <= begin <= end for begin, end in itertools.pairwise(bounds))
    return len(bounds) == len(weights) + 1 and ascending and bounds[0] == 0 and bounds[-1] == features
