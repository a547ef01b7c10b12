r"""The blocks that a device holds, and their products with a vector, piece by piece.

With :math:`K` partitions :math:`X_k` of rows, a block of rows is :math:`\\sum_k G_{jk} X_k`, and a raw one is a
partition itself. With the same data cut in blocks :math:`C_k` of columns, a block of columns is :math:`\\sum_k G'_{jk}
C_k`. It is kept by partition, as each part comes from another device, and transposed, so that a piece of it lies in one
place.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from farflung.coded.messages import Fetch, Malformed, Multiply
from farflung.errors import ConfigError

__all__ = [
    "MAX_PIECES",
    "ColumnBlock",
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
"""In how many a product is answered, at most."""
_MAX_NBYTES = 1 << 31
"""Of a message."""
_MAX_NAME = 200
CHUNK_NBYTES = 1 << 20
"""What one device gives another at once; a block may be larger than the memory that is left beside it."""


def piece_of(length: int, pieces: int, piece: int) -> tuple[int, int]:
    """Where a piece begins and ends.

    >>> [piece_of(10, 4, piece) for piece in range(4)]
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    return piece * length // pieces, (piece + 1) * length // pieces


def bounds_of(features: int, blocks: int) -> tuple[int, ...]:
    """Where column blocks begin, all but the last ones of one width, and where the last ends.

    >>> bounds_of(7, 3)
    (0, 3, 6, 7)
    """
    width = -(-features // blocks)
    return tuple(min(features, block * width) for block in range(blocks + 1))


def column_sums(rows: Tensor, weights: Sequence[float], bounds: Sequence[int]) -> Tensor:
    """The weighted sum of column blocks of some rows, transposed.

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
        """How many samples have as many numbers as are multiplied."""
        if not task.partitions:
            return len(self.data[begin:end])
        return -(-self.data[: len(task.operand), begin:end].numel() // self.data.shape[1])

    def multiply(self, begin: int, end: int, task: Multiply) -> Tensor:
        """Rows of it times the weights in the operand; or columns of it times the residuals of one partition there.

        Of the block and the residuals the higher one counts as if it ended with the other.
        """
        if not task.partitions:
            return self.data[begin:end] @ task.operand
        rows = min(len(self.data), len(task.operand))
        return self.data[:rows, begin:end].T @ task.operand[:rows]

    def give(self, request: Fetch) -> Tensor:
        """Rows of it, or the sums of their columns, transposed."""
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
        """How many samples have as many numbers as are multiplied."""
        return -(-sum(self.parts[one][begin:end].numel() for one in task.partitions) // self.features)

    def multiply(self, begin: int, end: int, task: Multiply) -> Tensor:
        """Columns of it times the residuals in the operand; those partitions count whose parts are here."""
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
        """Of the rows of one partition."""
        return self.parts[request.partition][:, request.begin : request.end].contiguous()


class Holding:
    """What a device has, for as long as it lives: it outlasts a connection to a coordinator.

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
        """The number of the block that its own data are."""
        self.run = ""
        """Whose numbers these are."""
        self.blocks: dict[int, RowBlock | ColumnBlock] = {}

    @property
    def coded(self) -> tuple[int, ...]:
        """The blocks that it has made."""
        return tuple(sorted(self.blocks.keys() - {self.raw}))

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks.values())

    def settle(self, run: str, raw: int) -> None:
        """Belongs to a run, under whose number its own data go; blocks of another run are dropped."""
        if run != self.run:
            self.blocks.clear()
        self.blocks.pop(self.raw, None)
        self.run, self.raw = run, raw
        if self.data is not None and raw >= 0:
            self.blocks[raw] = RowBlock(self.data)

    def drop(self, block: int) -> None:
        """One of them is not needed any more."""
        if block != self.raw:
            self.blocks.pop(block, None)

    def answering(self, task: Multiply) -> Mapping[int, RowBlock | ColumnBlock]:
        """The blocks that a task names, as far as they are here and can be multiplied.

        Raises:
          Malformed: the operand is not of their size, or the product is larger than any message.
        """
        named = ((number, self.blocks.get(number)) for number in task.blocks)  # blocks may go at any time
        chosen = {number: block for number, block in named if block is not None}
        if task.operand.dim() != 2:
            raise Malformed("an operand that is no matrix")
        if task.length < 1 or not 1 <= task.pieces <= MAX_PIECES:
            raise Malformed("a product in no pieces, or too many")
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
        """What another device asks for.

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
    """How many rows of so many numbers one device asks another for at once; it needs little beside its blocks."""
    return max(1, CHUNK_NBYTES // (8 * max(1, width)))


def widest(weights: Sequence[float], bounds: Sequence[int]) -> int:
    """Of the column blocks that have a weight."""
    return max((bounds[k + 1] - bounds[k] for k, weight in enumerate(weights) if weight), default=0)


def fit(weights: Sequence[float], bounds: Sequence[int], features: int) -> bool:
    """Whether these are the bounds of as many column blocks as there are weights, in so many columns."""
    ascending = all(0 <= begin <= end for begin, end in itertools.pairwise(bounds))
    return len(bounds) == len(weights) + 1 and ascending and bounds[0] == 0 and bounds[-1] == features
