"""The failure detector: which rank each rank is blocked on, and which rank an expired wait failed on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, TypeAlias

from farflung.comm.mailbox import Waiting
from farflung.types import Json

__all__ = ["BlockedOn", "FailureDetector"]

BlockedOn: TypeAlias = 'int | Literal["data"] | None'
"""The source of what a rank waits for: another rank, the rank's own stream of samples, or no rank in particular."""


class FailureDetector:
    """One rank's wait-for graph, from which it finds the rank that an expired wait failed on.

    After half the timeout, a rank broadcasts which rank it is blocked on. Its peers answer at once with what blocks
    them, and again whenever that changes.

    * A wait whose chain ends at a rank that waits for samples counts from the last report of that. A rank that has
      stopped answering reports nothing, so a wait on it expires.
    * An expired wait fails on the root of the chain of broadcast waits, each of which was half a timeout old. Answers
      take no part: their waits may have just begun.

    Args:
      rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self.blocked_on: dict[int, int | None] = {}
        """The rank that each peer has broadcast it is blocked on, for peers that have sent nothing since."""
        self.waits_for_data = False
        """Whether this rank waits for samples."""
        self._rank = rank
        self._held_by: dict[int, BlockedOn] = {}
        self._excused = -math.inf
        self._asked: tuple[Waiting, float] | None = None
        self._askers: dict[int, tuple[float, BlockedOn]] = {}
        self._behind: dict[int, int] = {}
        """The number of messages that each peer had sent before its last broadcast."""

    def blocked_by(self, waiting: Waiting | None) -> BlockedOn:
        """Names what blocks this rank, whose oldest wait for a message is ``waiting``."""
        return "data" if self.waits_for_data else None if waiting is None else waiting.src

    def counts_from(self, waiting: Waiting) -> float:
        """Returns the time in seconds from which a wait's deadline counts."""
        return max(waiting.since, self._excused)

    def asks(self, waiting: Waiting) -> bool:
        """Records a broadcast about an old wait; ``False`` where it was recorded before."""
        now_asked = waiting, self.counts_from(waiting)
        if self._asked == now_asked:
            return False
        self._asked = now_asked
        self._held_by.clear()
        return True

    def asked(self, waiting: Waiting) -> bool:
        return self._asked == (waiting, self.counts_from(waiting))

    def heard(self, rank: int, body: Mapping[str, Json], waiting: Waiting | None, now: float) -> None:
        """Records a peer's broadcast or answer.

        Args:
          rank: the peer.
          body: the message's body.
          waiting: this rank's oldest wait.
          now: the clock, in seconds.
        """
        reported = body.get("for")
        blocked_on: BlockedOn = (
            "data" if reported == "data" else reported if isinstance(reported, int) else None
        )
        excused = self._ends_at_data(waiting)
        self._held_by[rank] = blocked_on
        if excused or self._ends_at_data(waiting):
            self._excused = now
        if body.get("asks") is not True:
            return
        behind = body.get("behind")
        self._behind[rank] = behind if isinstance(behind, int) else 0
        self.blocked_on[rank] = None if blocked_on == "data" else blocked_on
        self._askers[rank] = now, None

    def moves(self, rank: int, count: int) -> None:
        """Discards a peer's broadcast once its ``count``-th message, sent after it, has arrived."""
        if count > self._behind.get(rank, 0):
            self.blocked_on.pop(rank, None)

    def to_tell(self, blocked_on: BlockedOn, now: float, deadline_s: float) -> list[int]:
        """Returns the peers that broadcast within the deadline and have not been sent ``blocked_on`` as an answer."""
        if not self._askers:
            return []
        self._askers = {rank: told for rank, told in self._askers.items() if now - told[0] < deadline_s}
        found = [rank for rank, (_, told) in self._askers.items() if told != blocked_on]
        for rank in found:
            self._askers[rank] = self._askers[rank][0], blocked_on
        return found

    def root_of(self, rank: int | None) -> int | None:
        """Follows the wait-for graph from ``rank`` to the rank that a wait on it failed on."""
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
        blocked_on: BlockedOn = waiting.src
        while isinstance(blocked_on, int) and blocked_on not in seen:
            seen.add(blocked_on)
            blocked_on = self._held_by.get(blocked_on)
        return blocked_on == "data"
