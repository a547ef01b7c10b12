"""The coordinator's book: which devices are there, which partitions, and which blocks hold what of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from farflung.coded.redundancy import redundancy
from farflung.coded.span import TOLERANCE, unit
from farflung.types import State

__all__ = ["Block", "Kind", "Member", "Partition", "Roster"]

Kind = Literal["rows", "columns"]
"""Of blocks: for products with weights, or with residuals."""

_TRIES = 3
"""How many blocks in a row may fail before a device is asked for none for a while."""


@dataclass(slots=True)
class Partition:
    """Data that a device has brought.

    Args:
      number: its column of the code.
      name: as its device calls it.
      labels: (rows,) float64.
      block: the number of it as a block.
      active: whether it is a part of what is trained on.
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
      kind: of which.
      coefficients: of each partition, or of each column block, that is in it.
      holder: the device's rank; ``None``: it is gone.
      ready: whether it is made.
      parts: of a block of columns, the partitions whose rows are in it.
      making: those whose rows are being fetched.
      replaces: the block that is not needed any more when this one is made.
    """

    number: int
    kind: Kind
    coefficients: Mapping[int, float]
    holder: int | None
    ready: bool = False
    parts: set[int] = field(default_factory=set)
    making: set[int] = field(default_factory=set)
    replaces: int | None = None

    @property
    def raw(self) -> int | None:
        """The one partition, or column block, that it is, as it is."""
        (only, *more) = self.coefficients.items()
        return only[0] if not more and only[1] == 1.0 else None


@dataclass(slots=True)
class Member:
    """A device that is there.

    Args:
      rank: its rank.
      silent: whether it has let a deadline pass, and not been heard of since.
      leaving: whether it has asked to go.
      late: whether it came when training had begun.
      unable: whether it could not make a block for reasons of its own; it is asked for no other.
      failures: how often in a row it could not make a block since another device gave it nothing.
    """

    rank: int
    silent: bool = False
    leaving: bool = False
    late: bool = False
    unable: bool = False
    failures: int = 0

    @property
    def rests(self) -> bool:
        """Whether it has failed so often that it is asked for no block for a while."""
        return self.failures >= _TRIES


class Roster:
    """Members, partitions and blocks; all questions about rank are answered here."""

    def __init__(self) -> None:
        self.members: dict[int, Member] = {}
        self.partitions: list[Partition] = []
        self.blocks: dict[int, Block] = {}
        self.features = 0
        """Columns of the data; 0: not known yet."""
        self.bounds: tuple[int, ...] = ()
        """Of the column blocks, once training has a first set of partitions."""
        self._numbers = 0

    def number(self) -> int:
        self._numbers += 1
        return self._numbers - 1

    # --- as a value -------------------------------------------------------------------------------------------------

    def tree(self) -> State:
        """What a coordinator that comes again has to know: all but who holds what, which devices tell."""
        return {
            "features": self.features,
            "bounds": list(self.bounds),
            "numbers": self._numbers,
            "partitions": {
                str(one.number): {
                    "name": one.name,
                    "block": one.block,
                    "active": one.active,
                    "labels": one.labels,
                }
                for one in self.partitions
            },
            "blocks": [
                [one.number, one.kind, list(map(list, one.coefficients.items())), sorted(one.parts)]
                for one in self.blocks.values()
            ],
        }

    @classmethod
    def from_tree(cls, tree: State) -> Roster:
        """The book that :meth:`tree` was made of, with nobody there."""
        roster = cls()
        roster.features, roster.bounds = tree["features"], tuple(tree["bounds"])
        roster._numbers = tree["numbers"]
        for number, one in sorted(tree["partitions"].items(), key=lambda item: int(item[0])):
            partition = Partition(int(number), one["name"], one["labels"], one["block"], one["active"])
            roster.partitions.append(partition)
        for number, kind, coefficients, parts in tree["blocks"]:
            mix = {int(unknown): float(weight) for unknown, weight in coefficients}
            roster.blocks[number] = Block(number, kind, mix, None, parts=set(parts))
        return roster

    # --- who and what -----------------------------------------------------------------------------------------------

    @property
    def heard(self) -> list[int]:
        """The ranks that are there and not silent."""
        return sorted(rank for rank, member in self.members.items() if not member.silent)

    @property
    def active(self) -> list[Partition]:
        """The partitions that are trained on."""
        return [partition for partition in self.partitions if partition.active]

    @property
    def column_blocks(self) -> int:
        """In how many the columns are cut."""
        return len(self.bounds) - 1

    def named(self, name: str) -> Partition | None:
        """The partition of this name."""
        return next((one for one in self.partitions if one.name == name), None)

    def lose(self, rank: int) -> None:
        """A device is gone, and what it held."""
        self.members.pop(rank, None)
        for block in self.blocks.values():
            if block.holder == rank:
                self.discard(block)

    def forsake(self, partition: Partition) -> None:
        """A partition is lost for good, and the coded blocks of rows that it is in."""
        for block in self.of("rows"):
            if partition.number in block.coefficients:
                self.discard(block)
        partition.active = False

    def discard(self, block: Block) -> None:
        """Nobody has it any more; whoever comes back with it still knows what is in it."""
        block.holder, block.ready = None, False
        block.making.clear()

    def built(self, block: Block, partitions: Iterable[int]) -> None:
        """It is made, or of a block of columns the parts of these partitions; other orders for it may be under way."""
        block.ready = True
        made = block.making.intersection(partitions)
        block.parts |= made
        block.making -= made

    def failed(self, block: Block) -> None:
        """It could not be made; one that was there before stays as it was."""
        block.making.clear()
        if not block.ready:
            self.discard(block)

    # --- blocks -----------------------------------------------------------------------------------------------------

    def of(self, kind: Kind) -> list[Block]:
        """The blocks of a kind that are with devices, made or being made."""
        return [block for block in self.blocks.values() if block.kind == kind and block.holder is not None]

    def there(self, kind: Kind, *, silent: bool = False) -> list[Block]:
        """Those that are made, with devices that are heard, or with silent ones too."""
        heard = set(self.members) if silent else set(self.heard)
        return [block for block in self.of(kind) if block.ready and block.holder in heard]

    def answering(self, kind: Kind) -> list[Block]:
        """Those that can answer for all that is trained on."""
        active = {partition.number for partition in self.active}
        if kind == "rows":
            return [block for block in self.there(kind) if active.issuperset(block.coefficients)]
        return [block for block in self.there(kind) if active.issubset(block.parts)]

    def raw(self, partition: Partition) -> Block | None:
        """A block that is this partition as it is, with a device that is heard."""
        return next((block for block in self.there("rows") if block.raw == partition.number), None)

    def unknowns(self, kind: Kind) -> list[int]:
        """What answers of a kind are solved for: partitions that are trained on, or column blocks."""
        if kind == "rows":
            return [partition.number for partition in self.active]
        return list(range(self.column_blocks))

    def matrix(self, blocks: Sequence[Block], unknowns: Sequence[int]) -> Tensor:
        """The coefficients of blocks, (blocks, unknowns)."""
        return torch.tensor(
            [[block.coefficients.get(one, 0.0) for one in unknowns] for block in blocks], dtype=torch.float64
        ).reshape(len(blocks), len(unknowns))

    # --- rank -------------------------------------------------------------------------------------------------------

    def rank(self, blocks: Sequence[Block], unknowns: Sequence[int]) -> int:
        """Of the coefficients of blocks."""
        return _rank(self.matrix(blocks, unknowns))

    def decodable(self, kind: Kind, *, silent: bool = False) -> bool:
        """Whether the answers of all that is there would do.

        Args:
          kind: of product.
          silent: whether devices count that are not heard.
        """
        unknowns = self.unknowns(kind)
        blocks = self.there(kind, silent=silent)
        if kind == "columns":
            active = {partition.number for partition in self.active}
            blocks = [block for block in blocks if active.issubset(block.parts)]
        return self.rank(blocks, unknowns) == len(unknowns)

    def recoverable(self, partition: Partition) -> bool:
        """Whether a partition follows from the blocks of rows that are with devices, heard or not."""
        blocks = self.there("rows", silent=True)
        if any(block.raw == partition.number for block in blocks):
            return True
        unknowns = [one.number for one in self.partitions]
        wanted = torch.tensor(
            [[float(number == partition.number) for number in unknowns]], dtype=torch.float64
        )
        rows = self.matrix(blocks, unknowns)
        return _rank(torch.cat([rows, wanted])) == _rank(rows)

    def redundancy(self, kind: Kind, most: int = 2) -> int:
        """How many devices may vanish at least, in the worst case; -1: some are missing already.

        Args:
          kind: of product.
          most: no more than this is looked for.
        """
        unknowns, blocks = self.unknowns(kind), self.answering(kind)
        rows = self.matrix(blocks, unknowns)
        return redundancy([*rows], len(unknowns), holders=[block.holder for block in blocks], enough=most)

    def missing(self, kind: Kind) -> list[int]:
        """The unknowns that the answers of devices that are heard do not determine."""
        unknowns, rows = self.unknowns(kind), self.matrix(self.answering(kind), self.unknowns(kind))
        whole = _rank(rows)
        eye = torch.eye(len(unknowns), dtype=torch.float64)
        return [
            one
            for place, one in enumerate(unknowns)
            if _rank(torch.cat([rows, eye[place : place + 1]])) > whole
        ]


def _rank(rows: Tensor) -> int:
    """Of rows of coefficients, as far as they would be decoded."""
    if not rows.numel():
        return 0
    values = torch.linalg.svdvals(unit(rows))
    return int((values > TOLERANCE * values[0]).sum())


def names(partitions: Iterable[Partition]) -> str:
    """Lists members by name in a message."""
    return ", ".join(partition.name or f"number {partition.number}" for partition in partitions)
