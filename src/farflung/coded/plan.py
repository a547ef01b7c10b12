"""How a set of answers is decoded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from farflung.coded.span import unit

__all__ = ["Plan", "Plans", "Who", "raw_partition"]

Who = TypeVar("Who", bound=Hashable)
"""What names the sender of an answer."""


class Plan(Generic[Who]):
    r"""One factorisation, for all answers of one set of devices.

    Raw answers are the partitions themselves. With M the partitions that are missing and H the others, the coded
    answers :math:`Y = G X` give

    .. math:: G_M X_M = Y - G_H X_H

    which is solved by QR, in the sense of least squares, with each row scaled to length 1 first. Equal sets of answers
    give equal bits, in whatever order they came.

    Args:
      rows: (K,), the coefficients of each answer; together of rank K.
    """

    def __init__(self, rows: Mapping[Who, Tensor]) -> None:
        self._raw: dict[int, Who] = {}
        coded: list[tuple[list[float], Who]] = []
        for who, row in rows.items():
            partition = raw_partition(row)
            if partition is None or partition in self._raw:
                coded.append((row.tolist(), who))
            else:
                self._raw[partition] = who
        coded.sort(key=lambda one: one[0])
        self._coded = [who for _, who in coded]
        matrix = torch.stack(list(rows.values()))
        self._partitions = matrix.shape[1]
        self.missing = tuple(k for k in range(self._partitions) if k not in self._raw)
        self.condition = _condition(unit(matrix))
        """Of the matrix of all rows, each scaled to length 1: largest over smallest singular value. In decoding,
        relative errors of the answers grow at most so many times."""
        if self.missing:
            by_row = torch.stack([rows[who] for who in self._coded])
            self._lengths = by_row.norm(dim=1)
            by_row = by_row / self._lengths[:, None]
            self._used = [k for k in sorted(self._raw) if by_row[:, k].any()]
            self._known = by_row[:, self._used]
            self._q, self._r = torch.linalg.qr(by_row[:, list(self.missing)])

    def apply(self, answers: Mapping[Who, Tensor], heights: Sequence[int] | None = None) -> list[Tensor]:
        """The K tensors that the answers are combinations of, in the order of the partitions.

        Devices may hold unlike numbers of rows: a coded block is as high as the highest partition, the others being
        padded with zeros below. A raw answer may have its partition's own height instead.

        Args:
          answers: by who sent it: (b, c) of a coded block, (at most b, c) of a raw one; float64.
          heights: rows of each partition; b for each where it is not given.

        Returns:
          Raw answers as they are, and (height, c) for each partition that was missing.
        """
        found = {k: answers[who] for k, who in self._raw.items()}
        if self.missing:
            found |= zip(self.missing, self._solved(answers), strict=True)
        return [found[k] if heights is None else found[k][: heights[k]] for k in range(self._partitions)]

    def _solved(self, answers: Mapping[Who, Tensor]) -> Tensor:
        """(missing, b, c)."""
        given = torch.stack([answers[who] for who in self._coded])
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


class Plans(Generic[Who]):
    """The plans made lately, so that pieces with answers of the same devices share one.

    Args:
      most: how many are kept.
    """

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._kept: OrderedDict[frozenset[tuple[Who, bytes]], Plan[Who]] = OrderedDict()

    def of(self, rows: Mapping[Who, Tensor]) -> Plan[Who]:
        """The plan for these rows, as :class:`Plan` takes them."""
        key = frozenset((who, row.numpy().tobytes()) for who, row in rows.items())
        if key not in self._kept:
            self._kept[key] = Plan(rows)
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]


def raw_partition(row: Tensor) -> int | None:
    """Which partition a row is the raw block of; ``None``: it is a coded block's."""
    coefficients = row.numpy()
    (places,) = coefficients.nonzero()
    return int(places[0]) if len(places) == 1 and coefficients[places[0]] == 1 else None


def _condition(rows: Tensor) -> float:
    values = torch.linalg.svdvals(rows)
    return float(values[0] / values[-1])
