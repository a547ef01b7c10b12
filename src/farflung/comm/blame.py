"""Who holds up whom: what replicas say about their waits, and from when on a wait counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, TypeAlias

from farflung.comm.mailbox import Waiting
from farflung.types import Json

__all__ = ["Blame", "Holdup"]

Holdup: TypeAlias = 'int | Literal["data"] | None'
"""What a replica waits for: a message of a rank, samples of its own stream, or nothing in particular."""


class Blame:
    """What one replica has heard of the others' waits, and what it has told them of its own.

    Halfway to its deadline a replica tells all whom it waits for, and so asks what they wait for themselves. They
    answer at once, and again when that changes. Two things follow:

    * A wait that ends at a replica which waits for samples counts from the last time at which that was heard. Whoever
      asks again half a deadline later gets no answer from a replica that has fallen silent meanwhile, and then its
      wait does run out.
    * The blame for a wait that has run out follows the waits that were told, which were half a deadline old, to their
      end. An answer may be of a wait that has just begun, and takes no part in it.

    Args:
      rank: of this replica.
    """

    def __init__(self, rank: int) -> None:
        self.blocked_on: dict[int, int | None] = {}
        """Whom the others wait for, of those that have told so by themselves and have sent nothing since."""
        self.waits_for_data = False
        """Whether this replica does."""
        self._rank = rank
        self._held_by: dict[int, Holdup] = {}
        self._excused = -math.inf
        self._asked: tuple[Waiting, float] | None = None
        self._askers: dict[int, tuple[float, Holdup]] = {}
        self._behind: dict[int, int] = {}
        """How many messages each had sent when it told whom it waits for."""

    def holdup(self, waiting: Waiting | None) -> Holdup:
        """What this replica waits for, where ``waiting`` is its oldest wait for a message."""
        return "data" if self.waits_for_data else None if waiting is None else waiting.src

    def counts_from(self, waiting: Waiting) -> float:
        """When a wait began, as its deadline has it."""
        return max(waiting.since, self._excused)

    def asks(self, waiting: Waiting) -> bool:
        """Whether the others have to be asked about a wait that is old; not twice for the same time."""
        now_asked = waiting, self.counts_from(waiting)
        if self._asked == now_asked:
            return False
        self._asked = now_asked
        self._held_by.clear()
        return True

    def asked(self, waiting: Waiting) -> bool:
        return self._asked == (waiting, self.counts_from(waiting))

    def heard(self, rank: int, body: Mapping[str, Json], waiting: Waiting | None, now: float) -> None:
        """Takes in what a replica says about its wait; it may ask about this one's.

        Args:
          rank: who says so.
          body: of its message.
          waiting: this replica's oldest wait.
          now: on the run's clock, in seconds.
        """
        said = body.get("for")
        holdup: Holdup = "data" if said == "data" else said if isinstance(said, int) else None
        excused = self._ends_at_data(waiting)
        self._held_by[rank] = holdup
        if excused or self._ends_at_data(waiting):
            self._excused = now
        if body.get("asks") is not True:
            return
        behind = body.get("behind")
        self._behind[rank] = behind if isinstance(behind, int) else 0
        self.blocked_on[rank] = None if holdup == "data" else holdup
        self._askers[rank] = now, None

    def moves(self, rank: int, count: int) -> None:
        """A replica's message has come, its ``count``-th; what it says of its waits overtakes those before."""
        if count > self._behind.get(rank, 0):
            self.blocked_on.pop(rank, None)

    def to_tell(self, holdup: Holdup, now: float, deadline_s: float) -> list[int]:
        """Who has asked within the deadline and does not know yet what this replica waits for now."""
        if not self._askers:
            return []
        self._askers = {rank: told for rank, told in self._askers.items() if now - told[0] < deadline_s}
        found = [rank for rank, (_, told) in self._askers.items() if told != holdup]
        for rank in found:
            self._askers[rank] = self._askers[rank][0], holdup
        return found

    def root_of(self, rank: int | None) -> int | None:
        """Who is to blame where ``rank`` is waited for."""
        seen = {self._rank}
        while rank is not None and rank not in seen and self.blocked_on.get(rank) not in (None, self._rank):
            seen.add(rank)
            rank = self.blocked_on[rank]
        return rank

    def _ends_at_data(self, waiting: Waiting | None) -> bool:
        if waiting is None:
            return False
        if waiting.src is None:
            return "data" in self._held_by.values()
        seen = {self._rank}
        holdup: Holdup = waiting.src
        while isinstance(holdup, int) and holdup not in seen:
            seen.add(holdup)
            holdup = self._held_by.get(holdup)
        return holdup == "data"
