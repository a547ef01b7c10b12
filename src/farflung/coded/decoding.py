"""Decoding of answers: which of them determine all partitions, and how these follow."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from farflung.errors import Undecodable

__all__ = [
    "MAX_CONDITION",
    "TOLERANCE",
    "Decoder",
    "Plan",
    "Plans",
    "Span",
    "combination",
    "raw_partition",
    "unit",
]

TOLERANCE = 1e-6
"""Of a row's length, what has to lie outside a span for the row to add a dimension. With less, a decoding matrix of
both would have a condition above :data:`MAX_CONDITION`."""
MAX_CONDITION = 1 / TOLERANCE
"""An answer in float64 is right to about 1e-16 of its size, so decoded products are right to 1e-10, which training
does not notice."""
_EXACT = 1e-9
"""Allowed difference of a combination, relative to the target's largest coefficient."""
_ROUNDING = 1e-12
"""Remainder of a coefficient whose terms cancel, relative to these."""

Index = TypeVar("Index", bound=Hashable)
"""Names a block, or the answer of one."""


class Span:
    """The span of the rows so far, by an orthonormal basis; each row costs O(K rank).

    Args:
      partitions: K, the length of a row.
      tolerance: see :data:`TOLERANCE`.
    """

    def __init__(self, partitions: int, tolerance: float = TOLERANCE) -> None:
        self._basis = np.zeros((partitions, partitions))
        self._tolerance = tolerance
        self.rank = 0

    def add(self, row: Tensor) -> bool:
        """Adds a row, (K,) and float64; tells whether the rank grew."""
        basis = self._basis[: self.rank]
        rest = row.numpy()
        length = math.sqrt(rest @ rest)
        if len(basis) == len(rest) or not length:
            return False
        for _ in range(2):  # the second pass removes what rounding has left: Gram-Schmidt, twice is enough
            rest = rest - (basis @ rest) @ basis
        outside = math.sqrt(rest @ rest)
        if not outside > self._tolerance * length:
            return False
        self._basis[self.rank] = rest / outside
        self.rank += 1
        return True


def unit(rows: Tensor) -> Tensor:
    """Scales rows to length 1, (..., K); zeros stay zeros."""
    return torch.nn.functional.normalize(rows, dim=-1, eps=torch.finfo(rows.dtype).tiny)


def raw_partition(row: Tensor) -> int | None:
    """Gives the partition that a row is the raw block of; ``None``: it is a coded block's."""
    coefficients = row.numpy()
    (places,) = coefficients.nonzero()
    return int(places[0]) if len(places) == 1 and coefficients[places[0]] == 1 else None


def combination(target: Tensor, rows: Mapping[Index, Tensor]) -> dict[Index, float] | None:
    """Finds blocks, and their coefficients, whose sum is the block of a wanted row.

    Raw blocks give what they can. For partitions without one, coded blocks are taken that are independent there, those
    of few partitions first.

    Args:
      target: (K,), float64; a unit vector for the repair of a raw block.
      rows: (K,) of each block; a partition is gone where none of them is its raw block.

    Returns:
      Coefficients other than 0, or ``None`` where these blocks do not make the wanted one.
    """
    raw: dict[int, Index] = {}
    coded: list[Index] = []
    for index, row in rows.items():
        partition = raw_partition(row)
        if partition is None or partition in raw:
            coded.append(index)
        else:
            raw[partition] = index
    gone = torch.tensor([k for k in range(len(target)) if k not in raw], dtype=torch.int64)
    span = Span(len(gone))
    coded.sort(key=lambda index: int(rows[index].count_nonzero()))
    chosen = [index for index in coded if span.add(rows[index][gone])]
    blocks = torch.stack([rows[index] for index in chosen]) if chosen else target.new_zeros(0, len(target))
    factors = target[gone] @ torch.linalg.pinv(blocks[:, gone], rtol=TOLERANCE)
    factors[factors.abs() <= _ROUNDING * factors.abs().sum()] = 0
    terms = factors[:, None] * blocks
    rest = target - terms.sum(0)
    rest[rest.abs() <= _ROUNDING * (target.abs() + terms.abs().sum(0))] = 0
    magnified = float((factors.abs() * blocks.norm(dim=1)).sum())
    if (
        float(rest[gone].abs().sum()) > _EXACT * float(target.abs().amax())
        or magnified * TOLERANCE > target.norm()
    ):
        return None
    found = {index: float(rest[k]) for k, index in sorted(raw.items())}
    found |= zip(chosen, factors.tolist(), strict=True)
    return {index: factor for index, factor in found.items() if factor}


class Plan(Generic[Index]):
    r"""One factorisation, for all answers of one set of blocks.

    Raw answers are the partitions themselves. With M the partitions that are missing and H the others, the coded
    answers :math:`Y = G X` give

    .. math:: G_M X_M = Y - G_H X_H

    which is solved by QR, in the sense of least squares, with each row scaled to length 1 first. Equal sets of answers
    give equal bits, in any order of arrival.

    Args:
      rows: (K,), the coefficients of each answer; together of rank K.
    """

    def __init__(self, rows: Mapping[Index, Tensor]) -> None:
        self._raw: dict[int, Index] = {}
        coded: list[tuple[list[float], Index]] = []
        for index, row in rows.items():
            partition = raw_partition(row)
            if partition is None or partition in self._raw:
                coded.append((row.tolist(), index))
            else:
                self._raw[partition] = index
        coded.sort(key=lambda one: one[0])
        self._coded = [index for _, index in coded]
        matrix = torch.stack(list(rows.values()))
        self._partitions = matrix.shape[1]
        self.missing = tuple(k for k in range(self._partitions) if k not in self._raw)
        values = torch.linalg.svdvals(unit(matrix))
        self.condition = float(values[0] / values[-1])
        """Of the matrix of all rows, each scaled to length 1: largest over smallest singular value. In decoding,
        relative errors of the answers grow at most so many times."""
        if self.missing:
            by_row = torch.stack([rows[index] for index in self._coded])
            self._lengths = by_row.norm(dim=1)
            by_row = by_row / self._lengths[:, None]
            self._used = [k for k in sorted(self._raw) if by_row[:, k].any()]
            self._known = by_row[:, self._used]
            self._q, self._r = torch.linalg.qr(by_row[:, list(self.missing)])

    def apply(self, answers: Mapping[Index, Tensor], heights: Sequence[int] | None = None) -> list[Tensor]:
        """Solves for the K tensors that the answers are combinations of, in the order of the partitions.

        Partitions may have unlike numbers of rows: a coded block is as high as the highest partition, the others being
        padded with zeros below. A raw answer may have its partition's own height instead.

        Args:
          answers: by block: (b, c) of a coded one, (at most b, c) of a raw one; float64.
          heights: rows of each partition; b for each where it is not given.

        Returns:
          Raw answers as they are, and (height, c) for each partition that was missing.
        """
        found = {k: answers[index] for k, index in self._raw.items()}
        if self.missing:
            found |= zip(self.missing, self._solved(answers), strict=True)
        return [found[k] if heights is None else found[k][: heights[k]] for k in range(self._partitions)]

    def _solved(self, answers: Mapping[Index, Tensor]) -> Tensor:
        """Solves for the missing partitions, (missing, b, c)."""
        given = torch.stack([answers[index] for index in self._coded])
        shape = given.shape[1:]
        rest = given.reshape(len(given), -1) / self._lengths[:, None]
        if self._used:
            known = given.new_zeros(len(self._used), *shape)
            for place, k in zip(known, self._used, strict=True):
                answer = answers[self._raw[k]]
                place[: len(answer)] = answer
            rest -= self._known @ known.reshape(len(known), -1)
        solved: Tensor = torch.linalg.solve_triangular(self._r, self._q.T @ rest, upper=True)
        return solved.reshape(len(self.missing), *shape)


class Plans(Generic[Index]):
    """The plans made lately, so that pieces with answers of the same blocks share one.

    Args:
      most: plans that are kept.
    """

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._kept: OrderedDict[frozenset[tuple[Index, bytes]], Plan[Index]] = OrderedDict()

    def of(self, rows: Mapping[Index, Tensor]) -> Plan[Index]:
        """Gives the plan for these rows, as :class:`Plan` takes them."""
        key = frozenset((index, row.numpy().tobytes()) for index, row in rows.items())
        if key not in self._kept:
            self._kept[key] = Plan(rows)
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]


class Decoder(Generic[Index]):
    """Takes answers until they determine all partitions.

    The rank is numeric: a row of which at most ``1 / max_condition`` of its length lies outside the span of those
    before it counts as dependent, since with it the condition would be too large. Where the answers are of full rank
    and yet too ill-conditioned, the decoder is not complete. It takes further answers, and then all count, by least
    squares.

    Args:
      partitions: K.
      max_condition: above it nothing is decoded; :class:`Plan` says of which matrix.
      plans: shared with other decoders, for example of other pieces; ``None``: its own.
    """

    def __init__(
        self, partitions: int, max_condition: float = MAX_CONDITION, plans: Plans[Index] | None = None
    ) -> None:
        self._partitions, self._max_condition = partitions, max_condition
        self._plans = plans or Plans[Index]()
        self._rows: dict[Index, Tensor] = {}
        self._raw: dict[int, Index] = {}
        self._span = Span(partitions, 1 / max_condition)
        self._counted: dict[Index, Tensor] | None = {}

    def add(self, index: Index, row: Tensor) -> bool:
        """Takes an answer; tells whether the rank grew. A raw one counts even where it did not, as it needs no solving.

        Args:
          index: of its block; once each.
          row: (partitions,), its coefficients, float64.

        Raises:
          ValueError: a second answer of the same block, another length, or a coefficient that is not finite.
        """
        if index in self._rows:
            raise ValueError(f"a second answer of {index!r}")
        if row.shape != (self._partitions,) or not np.isfinite(row.numpy()).all():
            raise ValueError(
                f"answer of {index!r}: {self._partitions} finite coefficients are needed, not {row.tolist()}"
            )
        self._rows[index] = row
        partition = raw_partition(row)
        if partition is not None:
            self._raw.setdefault(partition, index)
        self._counted = None
        return self._span.add(row)

    @property
    def complete(self) -> bool:
        """Whether the answers determine all partitions, with a condition of at most ``max_condition``."""
        return self.condition <= self._max_condition

    @property
    def rank(self) -> int:
        return self._span.rank

    @property
    def condition(self) -> float:
        """Of the rows that count; infinite while they are of less than full rank."""
        return self._plans.of(self._counting()).condition if self.rank == self._partitions else math.inf

    @property
    def missing(self) -> tuple[int, ...]:
        """The partitions without a raw answer."""
        return tuple(k for k in range(self._partitions) if k not in self._raw)

    @property
    def used(self) -> tuple[Index, ...]:
        """The blocks whose answers count, in the order of their arrival."""
        counted = self._counting()
        return tuple(index for index in self._rows if index in counted)

    def plan(self) -> Plan[Index]:
        """Gives the plan that decodes these answers; from :class:`Plans`, so perhaps made before.

        Raises:
          Undecodable: not :attr:`complete`.
        """
        if not self.complete:
            raise Undecodable(
                self._partitions, len(self._rows), self.rank, self.condition, self._max_condition
            )
        return self._plans.of(self._counting())

    def _counting(self) -> dict[Index, Tensor]:
        """Selects the raw answers and the first coded ones that they need, or all where these are ill-conditioned."""
        if self._counted is None:
            span = Span(self._partitions, 1 / self._max_condition)
            raw = {index: self._rows[index] for index in self._raw.values()}
            least = {index: row for index, row in (raw | self._rows).items() if span.add(row)}
            if self.rank == self._partitions and (
                len(least) < self._partitions or not self._plans.of(least).condition <= self._max_condition
            ):
                least = self._rows.copy()
            self._counted = least
        return self._counted
