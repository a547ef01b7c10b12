"""One way from one node to another."""

from __future__ import annotations

import math
from dataclasses import dataclass

from farflung.errors import ConfigError
from farflung.network.trace import Capacity, Trace, check_capacity, map_capacity

__all__ = ["Link", "both_lose"]

SEGMENT_NBYTES = 1448
"""Payload of one TCP segment on Ethernet: 1500 bytes less IP and TCP headers and the timestamp option."""


def both_lose(one: float, other: float) -> float:
    """The share of packets that is lost where two causes lose these shares independently."""
    return 1.0 - (1.0 - one) * (1.0 - other) if other else one


@dataclass(frozen=True, slots=True)
class Link:
    r"""What a message meets between two nodes, in one direction.

    A message of :math:`n` bytes that meets no other traffic takes

    .. math:: \text{latency} + 8 n / \text{bandwidth} + \text{jitter} \cdot u, \qquad u \in [-1, 1)

    Headers are not modelled: ``bandwidth_bps`` is what the payload gets.

    Args:
      latency_s: one-way delay, in seconds; with jitter, its mean.
      bandwidth_bps: bits per second, or a trace of them over time.
      jitter_s: the delay of a message is uniform in ``latency_s`` plus or minus this, as netem draws it; messages
        of one sender to one receiver stay in order all the same.
      loss: share of packets that are lost and sent again; see :meth:`goodput_bps`.

    Raises:
      ConfigError: a value out of its range; begins with its name.
    """

    latency_s: float = 0.0
    bandwidth_bps: Capacity = math.inf
    jitter_s: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and math.isfinite(self.latency_s)):
            raise ConfigError(f"latency_s = {self.latency_s}: must be a number of seconds, 0 or more")
        check_capacity("bandwidth_bps", self.bandwidth_bps)
        if not 0 <= self.jitter_s <= self.latency_s:
            raise ConfigError(
                f"jitter_s = {self.jitter_s}: must be 0 or more, and no more than latency_s = {self.latency_s}"
            )
        if not 0 <= self.loss < 1:
            raise ConfigError(f"loss = {self.loss}: must be a share of packets, at least 0 and below 1")

    def goodput_bps(self, round_trip_s: float) -> Capacity:
        r"""What is left of the bandwidth for one TCP connection under loss: loss is modelled as less throughput.

        .. math:: \min\Big( (1-p)\,b,\ \frac{8 \cdot 1448}{R} \max\big( 1.054\,(R/p)^{3/4},\ \sqrt{1.5 / p} \big) \Big)

        with bandwidth :math:`b`, loss :math:`p` and round trip :math:`R`. The first term is what retransmissions
        take; the second the average window of CUBIC, or of Reno where that is larger, over the round trip. A lost
        packet's own delay is not modelled. What is sent again is charged to this link, not to what it shares.

        References: RFC 8312 Eq. 7 (CUBIC, C = 0.4); Mathis et al. 1997 (Reno).
        """
        if self.loss == 0.0:
            return self.bandwidth_bps
        ceiling = math.inf
        if round_trip_s > 0:
            window = max(1.054 * (round_trip_s / self.loss) ** 0.75, math.sqrt(1.5 / self.loss))
            ceiling = 8 * SEGMENT_NBYTES * window / round_trip_s
        return map_capacity(self.bandwidth_bps, lambda bps: min((1 - self.loss) * bps, ceiling))

    def scaled(self, latency: float, bandwidth: float, trace_time: float = 1.0) -> Link:
        """Latency and jitter times ``latency``, bandwidth times ``bandwidth``; a trace runs ``trace_time`` longer."""
        capacity = map_capacity(self.bandwidth_bps, lambda bps: bandwidth * bps)
        if isinstance(capacity, Trace):
            capacity = capacity.stretched(trace_time)
        return Link(latency * self.latency_s, capacity, latency * self.jitter_s, self.loss)
