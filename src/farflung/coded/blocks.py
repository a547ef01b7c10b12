r"""The blocks of a device, and their products, piece by piece.

With :math:`K` partitions :math:`X_k` of rows, a block of rows is :math:`\\sum_k G_{jk} X_k`, and a raw one is a
partition itself. With the same data cut in blocks :math:`C_k` of columns, a block of columns is :math:`\\sum_k G'_{jk}
C_k`. It is kept by partition, as each part comes from another device, and transposed, so that a piece of it lies in one
place.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from farflung.coded.messages import Fetch, Malformed, Multiply
from farflung.errors import ConfigError

__all__ = [
    "MAX_PIECES",
    "ColumnBlock",
    "Draft",
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
class RowBlock:
    """A block of rows, raw or coded.

    Args:
      data: (rows, features).
    """

    data: Tensor

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def samples(self, begin: int, end: int, task: Multiply) -> int:
        """Computes the number of samples that have as many numbers as are multiplied."""
        if not task.partitions:
            return len(self.data[begin:end])
        return -(-self.data[: len(task.operand), begin:end].numel() // self.data.shape[1])

    def multiply(self, begin: int, end: int, task: Multiply) -> Tensor:
        """Multiplies rows by the weights in the operand; or columns by the residuals of one partition there.

        Of the block and the residuals the higher one counts as if it ended with the other.
        """
        if not task.partitions:
            return self.data[begin:end] @ task.operand
        rows = min(len(self.data), len(task.operand))
        return self.data[:rows, begin:end].T @ task.operand[:rows]

    def give(self, request: Fetch) -> Tensor:
        """Gives rows, or the sums of their columns, transposed."""
        rows = self.data[request.begin : request.end]
        return column_sums(rows, request.weights, request.bounds) if request.weights else rows


@dataclass(frozen=True, slots=True)
class ColumnBlock:
    """A block of columns, raw or coded.

    Args:
      features: of the whole data.
      parts: (width, rows) of each partition.
    """

    features: int
    parts: dict[int, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def samples(self, begin: int, end: int, task: Multiply) -> int:
        """Computes the number of samples that have as many numbers as are multiplied."""
        return -(-sum(self.parts[one][begin:end].numel() for one in task.partitions) // self.features)

    def multiply(self, begin: int, end: int, task: Multiply) -> Tensor:
        """Multiplies columns by the residuals in the operand; those partitions count whose parts are here."""
        total: Tensor | None = None
        at = 0
        for partition in task.partitions:
            part = self.parts[partition]
            product = part[begin:end] @ task.operand[at : at + part.shape[1]]
            total = product if total is None else total.add_(product)
            at += part.shape[1]
        assert total is not None
        return total

    def give(self, request: Fetch) -> Tensor:
        """Gives the columns of some rows of one partition."""
        return self.parts[request.partition][:, request.begin : request.end].contiguous()


@dataclass(slots=True)
class Draft:
    """A block that is not whole: what has been added to it is kept for the next order of the same block.

    Args:
      block: the sums so far.
      sums: of each stretch of rows, the terms of its sum and those that are missing, by partition and first row.
      fetched_nbytes: that other devices gave for it.
    """

    block: RowBlock | ColumnBlock
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
        self.blocks: dict[int, RowBlock | ColumnBlock] = {}
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
            self.blocks[raw] = RowBlock(self.data)

    def keep(self, number: int, block: RowBlock | ColumnBlock) -> None:
        """Takes in a block that is made; parts of a block of columns join those that are there."""
        before = self.blocks.get(number)
        if isinstance(block, ColumnBlock) and isinstance(before, ColumnBlock):
            block = ColumnBlock(block.features, {**before.parts, **block.parts})
        self.blocks[number] = block

    def drop(self, block: int) -> None:
        """Removes a block that is not needed any more."""
        if block != self.raw:
            self.blocks.pop(block, None)
            self.drafts.pop(block, None)

    def answering(self, task: Multiply) -> Mapping[int, RowBlock | ColumnBlock]:
        """Finds the blocks of a task that are here and can be multiplied.

        Raises:
          Malformed: the operand is not of their size, or the product is larger than any message.
        """
        named = ((number, self.blocks.get(number)) for number in task.blocks)  # blocks may go at any time
        chosen = {number: block for number, block in named if block is not None}
        if task.operand.dim() != 2:
            raise Malformed("an operand that is not a matrix")
        if task.length < 1 or not 1 <= task.pieces <= MAX_PIECES:
            raise Malformed("a number of pieces out of range")
        if 8 * task.operand.shape[1] * -(-task.length // task.pieces) > _MAX_NBYTES:
            raise Malformed("a piece larger than any message")
        for number, block in list(chosen.items()):
            if isinstance(block, RowBlock):
                due = task.operand.shape[0] if task.partitions else block.data.shape[1]
            elif all(partition in block.parts for partition in task.partitions) and task.partitions:
                due = sum(block.parts[partition].shape[1] for partition in task.partitions)
            else:
                del chosen[number]
                continue
            if task.operand.shape[0] != due:
                raise Malformed(f"an operand of {list(task.operand.shape)} for a block of {due}")
        return chosen

    def give(self, request: Fetch) -> Tensor:
        """Gives rows that another device asks for.

        Raises:
          Malformed: there is no such block, or no such part of it, or it is more than is given at once.
        """
        block = self.blocks.get(request.block)
        if isinstance(block, RowBlock):
            width = block.data.shape[1]
            fits = request.partition < 0 and (
                not request.weights or fit(request.weights, request.bounds, width)
            )
            if fits and request.weights:
                width = widest(request.weights, request.bounds)
        elif block is not None and request.partition in block.parts:
            fits, width = True, len(block.parts[request.partition])
        else:
            fits, width = False, 0
        if block is None or not fits or not 0 <= request.begin <= request.end:
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
