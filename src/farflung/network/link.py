"""One way from one node to another."""

from __future__ import annotations

import math
from dataclasses import dataclass

from farflung.errors import ConfigError
from farflung.network.tcp import CongestionControl, window_share_bps
from farflung.network.trace import Capacity, Trace, check_capacity, map_capacity

__all__ = ["Link", "both_lose"]


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

    def goodput_bps(self, round_trip_s: float, control: CongestionControl | None = None) -> Capacity:
        r"""What is left of the bandwidth for one TCP connection under loss: loss is modelled as less throughput.

        Retransmissions take their share :math:`p` of the bandwidth :math:`b`, and one connection gets no more than its
        average window carries: the smaller of :math:`(1-p)\,b` and
        :func:`farflung.network.window_share_bps`. A lost packet's own delay is not modelled. What is sent again
        is charged to this link, not to what it shares.

        Args:
          round_trip_s: both delays, in seconds.
          control: the congestion control in force; ``None`` counts as CUBIC.
        """
        if self.loss == 0.0:
            return self.bandwidth_bps
        ceiling = window_share_bps(control, self.loss, round_trip_s)
        return map_capacity(self.bandwidth_bps, lambda bps: min((1 - self.loss) * bps, ceiling))

    def scaled(self, latency: float, bandwidth: float, trace_time: float = 1.0) -> Link:
        """Latency and jitter times ``latency``, bandwidth times ``bandwidth``; a trace runs ``trace_time`` longer."""
        capacity = map_capacity(self.bandwidth_bps, lambda bps: bandwidth * bps)
        if isinstance(capacity, Trace):
            capacity = capacity.stretched(trace_time)
        return Link(latency * self.latency_s, capacity, latency * self.jitter_s, self.loss)
