"""The failure detector: which rank each rank is blocked on, and which rank a wait has failed on."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from farflung.comm.framing import LEAST_PIECE_NBYTES
from farflung.comm.mailbox import QUESTIONS, Waiting
from farflung.comm.transport import Traffic
from farflung.types import Json

__all__ = ["BUSY", "LEAST_NBYTES", "BlockedOn", "FailureDetector", "Progress"]

BlockedOn: TypeAlias = 'int | Literal["data"] | None'
"""The source of what a rank waits for: another rank, the rank's own stream of samples, or no rank in particular."""

BUSY = 10
"""The deadlines without progress after which a wait for a rank that answers fails."""
LEAST_NBYTES = LEAST_PIECE_NBYTES
"""The bytes of messages that count as progress where they are carried within a deadline."""


class Progress:
    """When a rank has made progress last, as its counters tell.

    A step, a computation, or a message is progress, and so are :data:`LEAST_NBYTES` bytes within one deadline.

    Args:
      since: the time from which it counts, in seconds.
      nbytes: the counter of bytes at that time.
    """

    def __init__(self, since: float = -math.inf, nbytes: int = 0) -> None:
        self.last_s = since
        self._count = 0
        self._nbytes, self._begin_s = nbytes, since

    def update(self, count: int, nbytes: int, now: float, deadline_s: float) -> None:
        """Compares the counters of events and bytes with those of the last call."""
        if count != self._count or abs(nbytes - self._nbytes) >= LEAST_NBYTES:
            self.last_s = now
        elif now - self._begin_s < deadline_s:
            return
        self._count, self._nbytes, self._begin_s = count, nbytes, now


@dataclass(slots=True)
class _Peer:
    """What is known of a peer."""

    blocked_on: BlockedOn = None
    """What it has told last."""
    progress: Progress = field(default_factory=Progress)
    """As it has told."""
    heard_s: float = -math.inf
    """When anything has arrived from it last."""
    heard_nbytes: int | None = None
    carried: Progress = field(default_factory=Progress)
    """Of the bytes to and from it."""


class Failure(NamedTuple):
    """Why a wait has failed.

    Args:
      rank: the rank that it has failed on; ``None``: no rank in particular.
      why: the reason, for the error.
    """

    rank: int | None
    why: str


class Check(NamedTuple):
    """The result of a look at the signs of life.

    Args:
      failure: of the wait; ``None``: it goes on.
      asks: whether the peers are to be asked now.
      due_s: when to look again, in seconds.
    """

    failure: Failure | None
    asks: bool
    due_s: float


class FailureDetector:
    """One rank's wait-for graph, from which it finds whether a wait has failed, and on which rank.

    While a wait lasts, a rank asks its peers :data:`farflung.comm.mailbox.QUESTIONS` times in each deadline. They
    answer at once with what blocks them and how far they are. So the age of a wait does not count:

    * It fails on its source where nothing has arrived from that for a deadline.
    * It fails on the root of the chain of waits where that answers, and no rank of the chain has made progress for
      :data:`BUSY` deadlines. A rank that waits for samples makes progress.

    A rank that has stood still itself counts from then on, since it has not read yet what has arrived meanwhile.

    Args:
      rank: this rank.
      traffic: gives the bytes that a peer's connections have carried.
      due_s: when the next look is due, in seconds.
    """

    def __init__(self, rank: int, traffic: Callable[[int], Traffic], due_s: float = math.inf) -> None:
        self._rank, self._traffic = rank, traffic
        self._peers: dict[int, _Peer] = {}
        self._waiting: Waiting | None = None
        self._awake_s = -math.inf
        """When this rank had stood still last."""
        self._asks_since: float | None = None
        """Since when the peers are asked; ``None``: they are not."""
        self._asked_s = -math.inf
        self._due_s = due_s

    def hear(self, rank: int, now: float) -> None:
        """Records that a message of a peer has arrived."""
        self._peer(rank).heard_s = max(self._peer(rank).heard_s, now)

    def hear_report(self, rank: int, body: Mapping[str, Json], now: float, deadline_s: float) -> None:
        """Records what a peer tells of itself.

        Args:
          rank: the peer.
          body: the message's body.
          now: the clock, in seconds.
          deadline_s: of the run.
        """
        peer, blocked_on = self._peer(rank), body.get("for")
        count, nbytes = body.get("count"), body.get("nbytes")
        peer.blocked_on = None
        if isinstance(blocked_on, int):
            peer.blocked_on = blocked_on
        elif blocked_on == "data":
            peer.blocked_on, peer.progress.last_s = "data", now
        if isinstance(count, int) and isinstance(nbytes, int):
            peer.progress.update(count, nbytes, now, deadline_s)

    def forget(self, rank: int) -> None:
        """Discards what is known of an earlier holder of a rank."""
        self._peers.pop(rank, None)

    def rest(self) -> None:
        """Ends the questions, since this rank waits for nothing."""
        self._waiting, self._asks_since, self._due_s = None, None, math.inf

    def check(self, waiting: Waiting, peers: Collection[int], now: float, deadline_s: float) -> Check:
        """Looks at the signs of life of those that the oldest wait depends on.

        Args:
          waiting: this rank's oldest wait.
          peers: the ranks that may be asked.
          now: the clock, in seconds.
          deadline_s: of the run.
        """
        interval_s = deadline_s / QUESTIONS
        if now > self._due_s + interval_s:
            self._awake_s, self._asks_since = now, None
        sources = peers if waiting.src is None else (waiting.src,)
        if waiting is not self._waiting:
            self._waiting = waiting
            self._look_at(sources, now, deadline_s)
        if now < waiting.since + interval_s:
            self._asks_since, self._due_s = None, waiting.since + interval_s
            return Check(None, False, self._due_s)
        asks = self._asks_since is None or now >= self._asked_s + interval_s
        self._look_at(peers if asks else sources, now, deadline_s)
        since = max(waiting.since, self._awake_s)
        failure = self._find_failure(waiting, peers, since, now, deadline_s)
        if asks:
            self._asked_s = now
            if self._asks_since is None:
                self._asks_since = now
        self._due_s = self._asked_s + interval_s
        if waiting.src is not None:
            silent_at = max(since, self._peer(waiting.src).heard_s) + deadline_s
            if silent_at > now:
                self._due_s = min(self._due_s, silent_at)
        return Check(failure, asks, self._due_s)

    def _find_failure(
        self, waiting: Waiting, peers: Collection[int], since: float, now: float, deadline_s: float
    ) -> Failure | None:
        chains = [self._follow(rank) for rank in (peers if waiting.src is None else (waiting.src,))]
        if waiting.src is None:  # those that wait for this rank are not waited for
            chains = [chain for chain in chains if chain[-1] != self._rank] or chains
        heard_s = max((self._peer(chain[0]).heard_s for chain in chains), default=-math.inf)
        silent_s = now - max(since, heard_s)
        has_asked = self._asks_since is not None and now >= self._asks_since + deadline_s / 2
        if has_asked and silent_s >= deadline_s:
            rank = chains[0][0] if len(chains) == 1 else waiting.src
            return Failure(rank, f"nothing has arrived for {silent_s:.1f} s")
        moved_s = [self._peer(chain[0]).carried.last_s for chain in chains]
        moved_s += [self._peer(rank).progress.last_s for chain in chains for rank in chain]
        idle_s = now - max([since, *moved_s])
        if idle_s >= BUSY * deadline_s:
            root = chains[0][-1] if len(chains) == 1 else waiting.src
            rank = waiting.src if root == self._rank else root
            return Failure(rank, f"it answers, but has made no progress for {idle_s:.1f} s")
        return None

    def _follow(self, rank: int) -> list[int]:
        """Follows the wait-for graph from a rank to its root; a circle ends with the rank that closes it."""
        chain = [rank]
        while rank != self._rank and chain.count(rank) == 1:
            blocked_on = self._peer(rank).blocked_on
            if not isinstance(blocked_on, int):
                break
            rank = blocked_on
            chain.append(rank)
        return chain

    def _look_at(self, ranks: Collection[int], now: float, deadline_s: float) -> None:
        for rank in ranks:
            peer, traffic = self._peer(rank), self._traffic(rank)
            if peer.heard_nbytes not in (None, traffic.heard_nbytes):
                peer.heard_s = now
            peer.heard_nbytes = traffic.heard_nbytes
            peer.carried.update(0, traffic.moved_nbytes, now, deadline_s)

    def _peer(self, rank: int) -> _Peer:
        return self._peers.setdefault(rank, _Peer())
