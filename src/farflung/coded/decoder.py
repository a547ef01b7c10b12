"""Which answers determine all partitions, told as they come."""

from __future__ import annotations

import math
from typing import Generic

import numpy as np
from torch import Tensor

from farflung.coded.plan import Plan, Plans, Who, raw_partition
from farflung.coded.span import TOLERANCE, Span
from farflung.errors import Undecodable

__all__ = ["MAX_CONDITION", "Decoder"]

MAX_CONDITION = 1 / TOLERANCE
"""An answer in float64 is right to about 1e-16 of its size, so what is decoded is right to 1e-10, which training
does not notice."""


class Decoder(Generic[Who]):
    """Takes answers until they determine all partitions.

    The rank is numeric: a row of which at most ``1 / max_condition`` of its length lies outside the span of those
    before it counts as dependent, since with it the condition would be too large. Where the answers are of full rank
    and yet too ill-conditioned, the decoder is not complete. It takes what else comes, and then all answers count, by
    least squares.

    Args:
      partitions: K.
      max_condition: above it nothing is decoded; of which matrix, :class:`farflung.coded.Plan` says.
      plans: shared with other decoders, of other pieces say; ``None``: its own.
    """

    def __init__(
        self, partitions: int, max_condition: float = MAX_CONDITION, plans: Plans[Who] | None = None
    ) -> None:
        self._partitions, self._max_condition = partitions, max_condition
        self._plans = plans or Plans[Who]()
        self._rows: dict[Who, Tensor] = {}
        self._raw: dict[int, Who] = {}
        self._span = self._empty()
        self._counted: dict[Who, Tensor] | None = {}

    def add(self, who: Who, row: Tensor) -> bool:
        """Takes an answer; whether the rank grew. A raw one counts even where it did not, as nothing is solved for it.

        Args:
          who: from whom; once each.
          row: (partitions,), its coefficients, float64.

        Raises:
          ValueError: a second answer of the same, another length, or a coefficient that is not finite.
        """
        if who in self._rows:
            raise ValueError(f"a second answer of {who!r}")
        if row.shape != (self._partitions,) or not np.isfinite(row.numpy()).all():
            raise ValueError(
                f"answer of {who!r}: {self._partitions} finite coefficients are needed, not {row.tolist()}"
            )
        self._rows[who] = row
        partition = raw_partition(row)
        if partition is not None:
            self._raw.setdefault(partition, who)
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
        """The partitions of which there is no raw answer."""
        return tuple(k for k in range(self._partitions) if k not in self._raw)

    @property
    def who(self) -> tuple[Who, ...]:
        """Those whose answers count, in the order in which they came."""
        counted = self._counting()
        return tuple(who for who in self._rows if who in counted)

    def plan(self) -> Plan[Who]:
        """How these answers are decoded; from :class:`farflung.coded.Plans`, so perhaps made before.

        Raises:
          Undecodable: not :attr:`complete`.
        """
        if not self.complete:
            raise Undecodable(
                self._partitions, len(self._rows), self.rank, self.condition, self._max_condition
            )
        return self._plans.of(self._counting())

    def _counting(self) -> dict[Who, Tensor]:
        """The raw answers and the first coded ones that they need, or all, where these are too ill-conditioned."""
        if self._counted is None:
            self._counted = self._least()
            if self.rank == self._partitions:
                least = self._counted
                if (
                    len(least) < self._partitions
                    or not self._plans.of(least).condition <= self._max_condition
                ):
                    self._counted = self._rows.copy()
        return self._counted

    def _least(self) -> dict[Who, Tensor]:
        raw = {who: self._rows[who] for who in self._raw.values()}
        span = self._empty()
        return {who: row for who, row in (raw | self._rows).items() if span.add(row)}

    def _empty(self) -> Span:
        return Span(self._partitions, 1 / self._max_condition)
