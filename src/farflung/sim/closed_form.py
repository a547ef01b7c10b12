"""Collectives computed as a whole: rows of messages instead of one after the other, with the same times and bits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from farflung.comm.channel import describe
from farflung.comm.collectives import COLLECTIVES, Collective, ring
from farflung.errors import ProtocolError
from farflung.sim.clock import Clock
from farflung.sim.members import InOne
from farflung.sim.owners import OwnersInOne
from farflung.sim.pairs import Pairs
from farflung.sim.ring import RingInOne
from farflung.tasks import Pending, failed
from farflung.types import Counts, Tag, TensorSpec

__all__ = ["ClosedForms"]


class _Whole(Protocol):
    """A collective that is computed as a whole."""

    hops: int

    def enter(self, rank: int, tensor: Tensor, side: Tensor) -> Pending[tuple[Tensor, Tensor]]:
        """Joins a rank at the current virtual time."""
        ...

    def sent(self, rank: int) -> Counts:
        """The bytes that a rank sends to each rank."""
        ...

    def fail(self, error: BaseException) -> None:
        """Fails the waits of all ranks that have joined."""
        ...


@dataclass(slots=True)
class _Open:
    """A collective that some ranks have not joined yet."""

    kind: tuple[object, ...] | None
    """What all ranks must agree on; ``None``: a codec encodes on each hop, so the collective runs hop by hop."""
    whole: _Whole | None
    joined: set[int] = field(default_factory=set)
    error: ProtocolError | None = None


class ClosedForms:
    """The collectives under way; each begins when its first rank joins.

    Args:
      clock: virtual time.
      pairs: the links.
      size: number of ranks.
    """

    def __init__(self, clock: Clock, pairs: Pairs, size: int) -> None:
        self._clock, self._pairs, self._size = clock, pairs, size
        self._open: dict[Tag, _Open] = {}

    def has(self, collective: Collective) -> bool:
        """Whether a collective has a closed form: a ring or sums by owners."""
        return collective.run is ring or collective.owners is not None

    def enter(
        self, rank: int, collective: str, tensor: Tensor, side: Tensor, encoded: bool, tag: Tag
    ) -> InOne | None:
        """Joins a rank in the collective whose first hop has ``tag``.

        Returns:
          The rank's part; ``None`` where it is encoded on every hop, which depends on the data.
        """
        kind = None if encoded else (collective, TensorSpec.of(tensor), TensorSpec.of(side))
        there = self._open.get(tag)
        if there is None:
            whole = None if encoded else self._begin(collective, tensor, side)
            there = self._open[tag] = _Open(kind, whole)
        there.joined.add(rank)
        if len(there.joined) == self._size:
            del self._open[tag]
        if there.kind != kind and there.error is None:
            there.error = ProtocolError(
                f"rank {rank} sent another kind of segment than was due: do all ranks run the same model and recipe?"
            )
            if there.whole is not None:
                there.whole.fail(there.error)
        if there.error is not None:
            return InOne(failed(there.error), np.zeros(self._size, dtype=np.int64), 0)
        if there.whole is None:
            return None
        return InOne(there.whole.enter(rank, tensor, side), there.whole.sent(rank), there.whole.hops)

    def waits_for(self, rank: int) -> str | None:
        """Names the first rank that is missing in the collective that ``rank`` waits in; ``None``: it waits in none."""
        for tag, there in self._open.items():
            if rank in there.joined:
                missing = next(other for other in range(self._size) if other not in there.joined)
                return f"rank {missing} ({describe(tag)})"
        return None

    def _begin(self, collective: str, tensor: Tensor, side: Tensor) -> _Whole:
        owners = COLLECTIVES[collective].owners
        if owners is None:
            return RingInOne(self._clock, self._pairs, self._size, tensor, side)
        return OwnersInOne(self._clock, self._pairs, self._size, owners(self._size), tensor, side)
