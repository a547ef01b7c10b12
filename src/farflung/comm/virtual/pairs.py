"""Messages where every ordered pair of ranks has a link of its own: when one arrives is known when it is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import NamedTuple, TypeAlias
from weakref import ref

import numpy as np
import numpy.typing as npt

from farflung.comm.virtual.clock import Clock, Departure
from farflung.comm.virtual.preemptive import Later, Overtaken, PreemptiveLink, Queued
from farflung.network import NetworkProfile
from farflung.network.link import mean_capacity
from farflung.noise import uniform, uniform_row

__all__ = ["Pairs", "Ranks", "Row", "by_time"]

Row: TypeAlias = npt.NDArray[np.float64]
Ranks: TypeAlias = npt.NDArray[np.int64]

FEW = 64
"""So many rows of messages are kept whether anybody waits for them or not."""


@dataclass(slots=True, weakref_slot=True)
class _Message:
    """One that has been sent by itself."""

    clock: Clock
    left: Departure
    arrived: Callable[[float], None]
    arrives_s: float = 0.0

    def arrives_at(self, t: float) -> None:
        """When it does, as far as is known."""
        self.arrives_s = t
        self.clock.at(t, partial(self._come, t))

    def put_off(self, later: Later) -> None:
        self.left.at = later.leaves_s
        if later.arrives_s > self.arrives_s:
            self.arrives_at(later.arrives_s)

    def _come(self, t: float) -> None:
        if t == self.arrives_s:
            self.arrived(t)


class _Row(NamedTuple):
    """Messages that were sent at one time, each over another link: to be overtaken until they have left."""

    src: int | Ranks
    dst: int | Ranks
    bits: float | Row
    begins_s: float | Row
    arrives_s: float | Row
    whose: ref[Overtaken]
    part: int

    def over(self, src: int, dst: int) -> Iterator[tuple[float, float, float]]:
        """Bits, begin and arrival of the one that goes from one rank to another, where there is one."""
        if any(isinstance(one, int) and one != rank for one, rank in ((self.src, src), (self.dst, dst))):
            return
        for place in np.flatnonzero((np.asarray(self.src) == src) & (np.asarray(self.dst) == dst)):
            rows = np.broadcast_arrays(self.bits, self.begins_s, self.arrives_s)
            bits, begins_s, arrives_s = (float(row.reshape(-1)[place]) for row in rows)
            yield bits, begins_s, arrives_s


class Pairs:
    """Links that nothing shares; messages in one direction follow each other, the most urgent priority first.

    A message leaves when those before it have left and its own bits have passed, and arrives one delay later. With
    jitter each message draws its own delay; it never arrives before one of its priority sent earlier on the same link.
    Many messages at once are computed by the same operations as one, so with the same bits.

    When a message arrives is known when it is sent, until a more urgent one overtakes it; then whoever counts on that
    time is told. A link is a :class:`farflung.comm.virtual.preemptive.PreemptiveLink` from its first message with
    another priority than 0 on.

    Args:
      clock: virtual time.
      profile: of dedicated links; see :func:`farflung.network.is_dedicated`.
      seed: of the jitter.
    """

    def __init__(self, clock: Clock, profile: NetworkProfile, seed: int) -> None:
        assert profile.nodes is not None
        self._clock, self._seed = clock, seed
        self._ranks = np.arange(profile.nodes)
        sites = range(len(profile.sites))
        self._site = np.array([site for site in sites for _ in profile.span(site)])
        # By site of the sender and of the receiver; a site of one node has no link to itself.
        self._latency_s, self._jitter_s = np.zeros((2, len(sites), len(sites)))
        self._rate_bps = np.ones((len(sites), len(sites)))
        for a, b in product(sites, sites):
            if a != b or len(profile.span(a)) > 1:
                link = profile.connection(a, b).link
                self._latency_s[a, b], self._jitter_s[a, b] = link.latency_s, link.jitter_s
                self._rate_bps[a, b] = mean_capacity(profile.goodput_bps(a, b))
        self.jitters = bool(self._jitter_s.any())
        """Whether any link does."""
        # Pages that no message touches take no memory.
        square = (profile.nodes, profile.nodes)
        self._free_at = np.zeros(square)
        self._last_arrival = np.zeros(square if self.jitters else (0, 0))
        self._sent = np.zeros(square if self.jitters else (0, 0), dtype=np.int64)
        self._under_way: list[_Row] = []
        """In the order in which they were sent; some have left."""
        self._most = FEW
        """With so many the list is gone through."""
        self._links: dict[tuple[int, int], PreemptiveLink] = {}
        self._urgent: Counter[tuple[int, int, int]] = Counter()
        """Messages with another priority than 0 so far, by it and link."""

    def send(
        self, src: int, dst: int, bits: int, priority: int, arrived: Callable[[float], None]
    ) -> Departure:
        a, b, now = self._site[src], self._site[dst], self._clock.now()
        delay = float(self._latency_s[a, b])
        if self.jitters:
            delay += float(self._jitter_s[a, b]) * (2.0 * self._drawn(src, dst, priority) - 1.0)
        message = _Message(self._clock, Departure(self._clock, now), arrived)
        whose: ref[Overtaken] = ref(message)
        if priority and (src, dst) not in self._links:
            self._links[src, dst] = self._take_over(src, dst)
        if (src, dst) in self._links:
            queued = Queued(priority, float(bits), delay, whose)
            self._links[src, dst].put(now, queued)
            leaves, arrives = queued.leaves_s, queued.arrives_s
        else:
            begins = max(now, float(self._free_at[src, dst]))
            leaves = self._free_at[src, dst] = begins + bits / float(self._rate_bps[a, b])
            arrives = leaves + delay
            if self.jitters:
                arrives = max(arrives, float(self._last_arrival[src, dst]))
                self._last_arrival[src, dst] = arrives
            self._keep(_Row(src, dst, float(bits), begins, arrives, whose, 0))
        message.left.at = leaves
        message.arrives_at(arrives)
        return message.left

    def _drawn(self, src: int, dst: int, priority: int) -> float:
        """Where in its range the delay of the next message is."""
        if priority:
            number = self._urgent[priority, src, dst]
            self._urgent[priority, src, dst] += 1
        else:
            number = int(self._sent[src, dst])
            self._sent[src, dst] += 1
        return uniform(self._seed, src, dst, number)

    def send_many(
        self,
        src: int | Ranks,
        dst: slice | Ranks,
        bits: float | Row,
        whose: Overtaken,
        part: int = 0,
    ) -> Row:
        """Messages from one rank to many, or from each rank of one list to its counterpart in another, now.

        Args:
          src: the senders.
          dst: the receivers; a message of a rank to itself means nothing, whatever comes of it.
          bits: of each message.
          whose: told of each that is overtaken; kept weakly.
          part: what it is told that they are.

        Returns:
          When each arrives, if no more urgent message comes.
        """
        a, b = self._site[src], self._site[dst]
        begins = np.maximum(self._free_at[src, dst], self._clock.now())
        leaves = begins + bits / self._rate_bps[a, b]
        self._free_at[src, dst] = leaves
        delay = self._latency_s[a, b]
        receivers = self._ranks[dst]
        if self.jitters:
            drawn = uniform_row(self._seed, src, receivers, self._sent[src, dst])
            self._sent[src, dst] += 1
            delay = delay + self._jitter_s[a, b] * (2.0 * drawn - 1.0)
        arrives: Row = leaves + delay
        if self.jitters:
            arrives = np.maximum(arrives, self._last_arrival[src, dst])
            self._last_arrival[src, dst] = arrives
        if len(receivers):
            row = _Row(src, receivers, bits, begins, arrives, ref(whose), part)
            self._keep(row)
            if self._links:
                return self._through_links(row, delay)
        return arrives

    def _through_links(self, row: _Row, delay: Row) -> Row:
        """When messages arrive of which some go over links that know priorities."""
        arrives = np.array(row.arrives_s)
        senders, receivers, bits, delays = np.broadcast_arrays(row.src, row.dst, row.bits, delay)
        for place, way in enumerate(zip(senders.tolist(), receivers.tolist(), strict=True)):
            if way in self._links:
                queued = Queued(0, float(bits[place]), float(delays[place]), row.whose, row.part)
                self._links[way].put(self._clock.now(), queued)
                arrives[place] = queued.arrives_s
        return arrives

    # --- overtaking ---------------------------------------------------------------------------------------------

    def _keep(self, row: _Row) -> None:
        """What has been sent may be overtaken."""
        if len(self._under_way) >= self._most:
            self._under_way = [one for one in self._under_way if one.whose() is not None]
            self._most = max(FEW, 2 * len(self._under_way))
        self._under_way.append(row)

    def _take_over(self, src: int, dst: int) -> PreemptiveLink:
        """A link that knows priorities, with what is under way on it."""
        a, b, now = self._site[src], self._site[dst], self._clock.now()
        rate_bps, queue = float(self._rate_bps[a, b]), list[Queued]()
        for row in self._under_way if self._free_at[src, dst] > now else ():
            for bits, begins, arrives in row.over(src, dst):
                leaves = begins + bits / rate_bps
                if leaves > now:
                    delay = float(self._latency_s[a, b])
                    queue.append(Queued(0, bits, delay, row.whose, row.part, begins, leaves, arrives))
        if not self.jitters:
            return PreemptiveLink(src, dst, rate_bps, queue, 0.0)
        for place, queued in enumerate(reversed(queue)):
            drawn = uniform(self._seed, src, dst, int(self._sent[src, dst]) - 1 - place)
            queued.delay_s += float(self._jitter_s[a, b]) * (2.0 * drawn - 1.0)
        last_arrival = 0.0 if queue else float(self._last_arrival[src, dst])
        return PreemptiveLink(src, dst, rate_bps, queue, last_arrival)


def by_time(times: Row) -> list[tuple[float, list[int]]]:
    """The places of each distinct time, in order."""
    found: dict[float, list[int]] = {}
    for place, t in enumerate(times.tolist()):
        found.setdefault(t, []).append(place)
    return list(found.items())
