"""Messages where every ordered pair of ranks has a link of its own: when one arrives is known when it is sent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from farflung.comm.framing import piece_nbytes, wire_nbytes
from farflung.errors import Unsupported
from farflung.network import NetworkProfile
from farflung.network.link import mean_capacity
from farflung.noise import uniform, uniform_row
from farflung.sim.clock import Clock, Departure

__all__ = ["Pairs", "Ranks", "Row", "by_time"]

Row: TypeAlias = npt.NDArray[np.float64]
Ranks: TypeAlias = npt.NDArray[np.int64]


class Pairs:
    """Links that nothing shares; messages in one direction follow each other.

    A message leaves when those before it have left and its own bits have passed, and arrives one delay later. With
    jitter each message draws its own delay; it never arrives before one sent earlier on the same link. Many messages
    at once are computed by the same operations as one, so with the same bits.

    Args:
      clock: virtual time.
      profile: of dedicated links; see :func:`farflung.network.is_dedicated`.
      seed: of the jitter.
      sealed: whether connections are encrypted.
    """

    def __init__(self, clock: Clock, profile: NetworkProfile, seed: int, *, sealed: bool = False) -> None:
        assert profile.nodes is not None
        self._clock, self._seed, self._sealed = clock, seed, sealed
        self._ranks = np.arange(profile.nodes)
        sites = range(len(profile.sites))
        self._site = np.array([site for site in sites for _ in profile.span(site)])
        # By site of the sender and of the receiver; a site of one node has no link to itself.
        self._latency_s, self._jitter_s = np.zeros((2, len(sites), len(sites)))
        self._rate_bps = np.ones((len(sites), len(sites)))
        """Of one connection."""
        self._connections, self._piece = np.ones((2, len(sites), len(sites)), dtype=np.int64)
        for a, b in product(sites, sites):
            if a != b or len(profile.span(a)) > 1:
                link = profile.connection(a, b).link
                self._latency_s[a, b], self._jitter_s[a, b] = link.latency_s, link.jitter_s
                rate_bps = mean_capacity(profile.goodput_bps(a, b))
                self._connections[a, b] = connections = profile.connections_of(a, b)
                self._rate_bps[a, b], self._piece[a, b] = rate_bps / connections, piece_nbytes(rate_bps)
        self.jitters = bool(self._jitter_s.any())
        """Whether any link does."""
        # Pages that no message touches take no memory.
        square = (profile.nodes, profile.nodes)
        self._free_at = np.zeros(square)
        self._last_arrival = np.zeros(square if self.jitters else (0, 0))
        self._sent = np.zeros(square if self.jitters else (0, 0), dtype=np.int64)

    def send(
        self, src: int, dst: int, nbytes: int, priority: int, arrived: Callable[[float], None]
    ) -> Departure:
        """See :class:`farflung.sim.clock.Carrier`.

        Raises:
          Unsupported: a priority, which may change when messages arrive that were sent before.
        """
        if priority:
            raise Unsupported(
                "messages with a priority: none overtakes where collectives are computed as a whole: make the world "
                "with closed_form=False"
            )
        a, b, now = self._site[src], self._site[dst], self._clock.now()
        bits = (
            8.0 * wire_nbytes(nbytes, int(self._piece[a, b]), sealed=self._sealed) / self._connections[a, b]
        )
        leaves = max(now, float(self._free_at[src, dst])) + float(bits / self._rate_bps[a, b])
        arrives = leaves + float(self._latency_s[a, b])
        self._free_at[src, dst] = leaves
        if self.jitters:
            drawn = uniform(self._seed, src, dst, int(self._sent[src, dst]))
            delay = float(self._latency_s[a, b]) + float(self._jitter_s[a, b]) * (2.0 * drawn - 1.0)
            arrives = max(leaves + delay, float(self._last_arrival[src, dst]))
            self._last_arrival[src, dst] = arrives
            self._sent[src, dst] += 1
        self._clock.at(arrives, partial(arrived, arrives))
        return Departure(self._clock, leaves)

    def send_many(self, src: int | Ranks, dst: slice | Ranks, nbytes: int | Ranks) -> Row:
        """Messages from one rank to many, or from each rank of one list to its counterpart in another, now.

        Args:
          src: the senders.
          dst: the receivers; a message of a rank to itself means nothing, whatever comes of it.
          nbytes: of each message.

        Returns:
          When each arrives.
        """
        a, b = self._site[src], self._site[dst]
        wire = wire_nbytes(np.asarray(nbytes), self._piece[a, b], sealed=self._sealed)
        bits = 8.0 * wire / self._connections[a, b]
        leaves = np.maximum(self._free_at[src, dst], self._clock.now()) + bits / self._rate_bps[a, b]
        self._free_at[src, dst] = leaves
        delay = self._latency_s[a, b]
        if self.jitters:
            drawn = uniform_row(self._seed, src, self._ranks[dst], self._sent[src, dst])
            self._sent[src, dst] += 1
            delay = delay + self._jitter_s[a, b] * (2.0 * drawn - 1.0)
        arrives: Row = leaves + delay
        if self.jitters:
            arrives = np.maximum(arrives, self._last_arrival[src, dst])
            self._last_arrival[src, dst] = arrives
        return arrives


def by_time(times: Row) -> list[tuple[float, list[int]]]:
    """The places of each distinct time, in order."""
    found: dict[float, list[int]] = {}
    for place, t in enumerate(times.tolist()):
        found.setdefault(t, []).append(place)
    return list(found.items())
