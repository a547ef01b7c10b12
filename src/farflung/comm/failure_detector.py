"""Failure detector: the rank that each rank is blocked on, and the rank on which a wait has failed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from farflung.comm.framing import MIN_PIECE_NBYTES
from farflung.comm.mailbox import PROBES_PER_DEADLINE, PendingRecv
from farflung.comm.transport import ConnectionTraffic
from farflung.types import Json

__all__ = ["MAX_IDLE_DEADLINES", "MIN_PROGRESS_NBYTES", "BlockedOn", "FailureDetector", "ProgressTracker"]

BlockedOn: TypeAlias = 'int | Literal["data"] | None'
"""Source that a rank waits for: another rank, the rank's own stream of samples, or no rank in particular."""

MAX_IDLE_DEADLINES = 10
"""Number of deadlines without progress after which a wait for a responsive rank fails."""
MIN_PROGRESS_NBYTES = MIN_PIECE_NBYTES
"""Bytes of messages that count as progress if they are carried within a deadline."""


class ProgressTracker:
    """Time of a rank's last progress, by its counters.

    A step, a computation, a message, or :data:`MIN_PROGRESS_NBYTES` bytes within one deadline are progress.

    Args:
      start_s: Time from which it counts, in seconds.
      nbytes: Counter of bytes at that time.
    """

    def __init__(self, start_s: float = -math.inf, nbytes: int = 0) -> None:
        self.last_s = start_s
        self._count = 0
        self._nbytes, self._begin_s = nbytes, start_s

    def update(self, count: int, nbytes: int, time_s: float, deadline_s: float) -> None:
        """Compares the counters of events and bytes with those of the last call."""
        if count != self._count or abs(nbytes - self._nbytes) >= MIN_PROGRESS_NBYTES:
            self.last_s = time_s
        elif time_s - self._begin_s < deadline_s:
            return
        self._count, self._nbytes, self._begin_s = count, nbytes, time_s


@dataclass(slots=True)
class _Peer:
    """State of a peer."""

    blocked_on: BlockedOn = None
    """Source that it was blocked on, by its last report."""
    progress: ProgressTracker = field(default_factory=ProgressTracker)
    """Progress by its reports."""
    last_received_s: float = -math.inf
    """Time of the last bytes from it."""
    received_nbytes: int | None = None
    traffic: ProgressTracker = field(default_factory=ProgressTracker)
    """Progress of the bytes to and from it."""


class Failure(NamedTuple):
    """Failure of a wait.

    Args:
      rank: Rank that it has failed on; None for no rank in particular.
      reason: Reason, for the error.
    """

    rank: int | None
    reason: str


class Check(NamedTuple):
    """Result of a check of the signs of life.

    Args:
      failure: Failure of the wait; None if it goes on.
      should_probe: True if the peers are to be probed now.
      next_check_s: Time of the next check, in seconds.
    """

    failure: Failure | None
    should_probe: bool
    next_check_s: float


class FailureDetector:
    """Wait-for graph of one rank, which finds if a wait has failed, and on which rank.

    While a wait lasts, a rank probes its peers :data:`farflung.comm.mailbox.PROBES_PER_DEADLINE` times per deadline.
    They answer at once with their progress and the source that blocks them. So the age of a wait does not count:

    * It fails on its source if nothing has arrived from it for a deadline.
    * It fails on the root of the chain of waits if the root answers, and no rank of the chain has made progress for
      :data:`MAX_IDLE_DEADLINES` deadlines. A rank that waits for samples makes progress.

    If this rank itself has been suspended, all times count from its return, since it has not read its messages yet.

    Args:
      rank: This rank.
      get_traffic: Returns the bytes that a peer's connections have carried.
      next_check_s: Time of the next check, in seconds.
    """

    def __init__(
        self, rank: int, get_traffic: Callable[[int], ConnectionTraffic], next_check_s: float = math.inf
    ) -> None:
        self._rank, self._get_traffic = rank, get_traffic
        self._peers: dict[int, _Peer] = {}
        self._waiting: PendingRecv | None = None
        self._resumed_s = -math.inf
        """Time at which this rank last returned from a suspension."""
        self._probing_since_s: float | None = None
        """Time since which the peers are probed; None if they are not."""
        self._last_probe_s = -math.inf
        self._next_check_s = next_check_s

    def record_message(self, rank: int, time_s: float) -> None:
        """Records that a message of a peer has arrived."""
        self._get_peer(rank).last_received_s = max(self._get_peer(rank).last_received_s, time_s)

    def record_report(self, rank: int, body: Mapping[str, Json], time_s: float, deadline_s: float) -> None:
        """Records a peer's report of itself.

        Args:
          rank: Rank of the peer.
          body: Body of the message.
          time_s: Current time, in seconds.
          deadline_s: Deadline of the run.
        """
        peer, blocked_on = self._get_peer(rank), body.get("for")
        count, nbytes = body.get("count"), body.get("nbytes")
        peer.blocked_on = None
        if isinstance(blocked_on, int):
            peer.blocked_on = blocked_on
        elif blocked_on == "data":
            peer.blocked_on, peer.progress.last_s = "data", time_s
        if isinstance(count, int) and isinstance(nbytes, int):
            peer.progress.update(count, nbytes, time_s, deadline_s)

    def stop_probing(self) -> None:
        """Stops the probes, since this rank waits for nothing."""
        self._waiting, self._probing_since_s, self._next_check_s = None, None, math.inf

    def check(self, waiting: PendingRecv, peers: Collection[int], time_s: float, deadline_s: float) -> Check:
        """Checks the signs of life of the ranks that the oldest wait depends on.

        Args:
          waiting: This rank's oldest wait.
          peers: Ranks that may be probed.
          time_s: Current time, in seconds.
          deadline_s: Deadline of the run.
        """
        interval_s = deadline_s / PROBES_PER_DEADLINE
        if time_s > self._next_check_s + interval_s:
            self._resumed_s, self._probing_since_s = time_s, None
        sources = peers if waiting.src is None else (waiting.src,)
        if waiting is not self._waiting:
            self._waiting = waiting
            self._update_traffic(sources, time_s, deadline_s)
        if time_s < waiting.start_s + interval_s:
            self._probing_since_s, self._next_check_s = None, waiting.start_s + interval_s
            return Check(None, False, self._next_check_s)
        should_probe = self._probing_since_s is None or time_s >= self._last_probe_s + interval_s
        self._update_traffic(peers if should_probe else sources, time_s, deadline_s)
        start_s = max(waiting.start_s, self._resumed_s)
        failure = self._find_failure(waiting, peers, start_s, time_s, deadline_s)
        if should_probe:
            self._last_probe_s = time_s
            if self._probing_since_s is None:
                self._probing_since_s = time_s
        self._next_check_s = self._last_probe_s + interval_s
        if waiting.src is not None:
            silent_at_s = max(start_s, self._get_peer(waiting.src).last_received_s) + deadline_s
            if silent_at_s > time_s:
                self._next_check_s = min(self._next_check_s, silent_at_s)
        return Check(failure, should_probe, self._next_check_s)

    def _find_failure(
        self, waiting: PendingRecv, peers: Collection[int], start_s: float, time_s: float, deadline_s: float
    ) -> Failure | None:
        chains = [self._follow(rank) for rank in (peers if waiting.src is None else (waiting.src,))]
        if waiting.src is None:  # ranks that wait for this rank do not count
            chains = [chain for chain in chains if chain[-1] != self._rank] or chains
        heard_s = max((self._get_peer(chain[0]).last_received_s for chain in chains), default=-math.inf)
        silent_s = time_s - max(start_s, heard_s)
        has_asked = self._probing_since_s is not None and time_s >= self._probing_since_s + deadline_s / 2
        if has_asked and silent_s >= deadline_s:
            rank = chains[0][0] if len(chains) == 1 else waiting.src
            return Failure(rank, f"nothing has arrived for {silent_s:.1f} s")
        progress_s = [self._get_peer(chain[0]).traffic.last_s for chain in chains]
        progress_s += [self._get_peer(rank).progress.last_s for chain in chains for rank in chain]
        idle_s = time_s - max([start_s, *progress_s])
        if idle_s >= MAX_IDLE_DEADLINES * deadline_s:
            root = chains[0][-1] if len(chains) == 1 else waiting.src
            rank = waiting.src if root == self._rank else root
            return Failure(rank, f"it answers, but has made no progress for {idle_s:.1f} s")
        return None

    def _follow(self, rank: int) -> list[int]:
        """Follows the wait-for graph from a rank to its root; a circle ends with the rank that closes it."""
        chain = [rank]
        while rank != self._rank and chain.count(rank) == 1:
            blocked_on = self._get_peer(rank).blocked_on
            if not isinstance(blocked_on, int):
                break
            rank = blocked_on
            chain.append(rank)
        return chain

    def _update_traffic(self, ranks: Collection[int], time_s: float, deadline_s: float) -> None:
        for rank in ranks:
            peer, traffic = self._get_peer(rank), self._get_traffic(rank)
            if peer.received_nbytes not in (None, traffic.received_nbytes):
                peer.last_received_s = time_s
            peer.received_nbytes = traffic.received_nbytes
            peer.traffic.update(0, traffic.bulk_nbytes, time_s, deadline_s)

    def _get_peer(self, rank: int) -> _Peer:
        return self._peers.setdefault(rank, _Peer())
