"""Links from one node to another, and capacities over time."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from farflung.errors import ConfigError
from farflung.network.tcp import CongestionControl, compute_window_bps
from farflung.options import check_seconds, require

__all__ = [
    "After",
    "BandwidthTrace",
    "Capacity",
    "Link",
    "check_capacity",
    "combine_losses",
    "compute_mean_capacity",
    "get_capacity",
    "map_capacity",
    "scale_capacity",
]


After: TypeAlias = Literal["error", "hold", "repeat"]
"""End of a trace: the run fails, the last value stays, or the trace repeats."""


@dataclass(frozen=True, slots=True)
class BandwidthTrace:
    """Bandwidth over time, in steps.

    Args:
      times_s: Start of each value, in seconds, ascending from 0.
      bandwidth_bps: Values in bits per second; 0 is an outage.
      end_s: End of the last value.
      after: Behaviour after the end.
      name: Name for messages.

    Raises:
      ConfigError: it does not start at 0, is out of order, has a negative value, or ends in a permanent outage.
    """

    times_s: tuple[float, ...]
    bandwidth_bps: tuple[float, ...]
    end_s: float
    after: After = "error"
    name: str = "trace"

    def __post_init__(self) -> None:
        if not self.times_s or len(self.times_s) != len(self.bandwidth_bps):
            raise ConfigError(
                f"{len(self.times_s)} times_s and {len(self.bandwidth_bps)} bandwidth_bps: give as many "
                "of one as of the other, at least one"
            )
        if self.times_s[0] != 0 or any(
            not a < b for a, b in zip(self.times_s, self.times_s[1:], strict=False)
        ):
            raise ConfigError("times_s must begin at 0 and ascend")
        is_valid_end = self.times_s[-1] < self.end_s < math.inf
        require(is_valid_end, "end_s", self.end_s, "after the last of times_s")
        for bps in self.bandwidth_bps:
            require(0 <= bps < math.inf, "bandwidth_bps", bps, "a number of bits per second, 0 or more")
        choices = get_args(After)
        require(self.after in choices, "after", repr(self.after), f"one of {', '.join(choices)}")
        if not any(self.bandwidth_bps) or (self.after == "hold" and self.bandwidth_bps[-1] == 0):
            raise ConfigError("bandwidth_bps stays at 0: nothing would ever arrive")

    def get_bandwidth(self, time_s: float) -> float:
        """Returns the bandwidth at a time, in bits per second; ``after`` decides what follows the trace's end.

        Raises:
          ConfigError: the trace has ended.
        """
        if time_s >= self.end_s:
            if self.after == "error":
                raise ConfigError(
                    f"{self.name}: ends at {self.end_s:g} s and the run continues: make it longer, or say "
                    'after = "repeat" or after = "hold"'
                )
            if self.after == "hold":
                return self.bandwidth_bps[-1]
        cycle_start = self._find_cycle_start(time_s)
        return self.bandwidth_bps[self._find_step(cycle_start, time_s)]

    def get_next_change(self, time_s: float) -> float:
        """Returns the start of the next step after a time; infinity if there is none."""
        if self.after == "hold" and time_s >= self.times_s[-1]:
            return math.inf
        cycle_start = self._find_cycle_start(time_s) if self.after == "repeat" else 0.0
        next_step = self._find_step(cycle_start, time_s) + 1
        if next_step < len(self.times_s):
            return cycle_start + self.times_s[next_step]
        return cycle_start + self.end_s

    @property
    def mean_bps(self) -> float:
        """Mean bandwidth over its length."""
        ends = (*self.times_s[1:], self.end_s)
        steps = zip(self.times_s, ends, self.bandwidth_bps, strict=True)
        return math.fsum((end - begin) * bps for begin, end, bps in steps) / self.end_s

    def map_values(self, change: Callable[[float], float]) -> BandwidthTrace:
        """Maps the values; returns a trace with equal times."""
        return replace(self, bandwidth_bps=tuple(change(bps) for bps in self.bandwidth_bps))

    def _find_cycle_start(self, time_s: float) -> float:
        """Finds the start of the repetition that contains a time, by the sums that :meth:`get_next_change` returns."""
        if time_s < self.end_s:
            return 0.0
        count = int(time_s // self.end_s)
        while count * self.end_s > time_s:
            count -= 1
        while (count + 1) * self.end_s <= time_s or count * self.end_s + self.end_s <= time_s:
            count += 1
        return count * self.end_s

    def _find_step(self, cycle_start: float, time_s: float) -> int:
        starts = [cycle_start + begin for begin in self.times_s]
        return max(0, bisect_right(starts, time_s) - 1)


Capacity: TypeAlias = float | BandwidthTrace
"""Bits per second, constant or over time; infinity is no limit."""


def check_capacity(name: str, capacity: Capacity) -> None:
    """Checks that a constant is above 0; a trace checks itself.

    Raises:
      ConfigError: it is not; begins with ``name``.
    """
    require(isinstance(capacity, BandwidthTrace) or capacity > 0, name, capacity, "above 0 bits per second")


def get_capacity(capacity: Capacity, time_s: float) -> float:
    """Returns the bits per second at a time."""
    return capacity.get_bandwidth(time_s) if isinstance(capacity, BandwidthTrace) else capacity


def compute_mean_capacity(capacity: Capacity) -> float:
    """Computes the mean bits per second."""
    return capacity.mean_bps if isinstance(capacity, BandwidthTrace) else capacity


def map_capacity(capacity: Capacity, change: Callable[[float], float]) -> Capacity:
    """Maps the values of a capacity, which may depend on time."""
    if isinstance(capacity, BandwidthTrace):
        return capacity.map_values(change)
    return change(capacity)


def scale_capacity(capacity: Capacity, factor: float, trace_time: float = 1.0) -> Capacity:
    """Multiplies a capacity by ``factor``, and the durations of a trace by ``trace_time``."""
    if not isinstance(capacity, BandwidthTrace):
        return factor * capacity
    times_s = tuple(trace_time * t for t in capacity.times_s)
    return replace(
        capacity.map_values(lambda bps: factor * bps), times_s=times_s, end_s=trace_time * capacity.end_s
    )


def combine_losses(loss: float, extra_loss: float) -> float:
    """Combines two independent shares of lost packets."""
    return 1.0 - (1.0 - loss) * (1.0 - extra_loss) if extra_loss else loss


@dataclass(frozen=True, slots=True)
class Link:
    r"""Link between two nodes, in one direction.

    A message that has :math:`n` bytes on the wire and meets no other traffic takes

    .. math:: \text{latency} + 8 n / \text{bandwidth} + \text{jitter} \cdot u, \qquad u \in [-1, 1)

    ``bandwidth_bps`` is for TCP's payload; headers of TCP and IP are not modelled.

    Args:
      latency_s: One-way delay, in seconds; with jitter, its mean.
      bandwidth_bps: Bits per second, or a trace of them over time.
      jitter_s: Bound of a message's deviation from ``latency_s``, uniform as netem draws it; messages of one
        sender to one receiver stay in order.
      loss: Share of packets that are lost and retransmitted; see :meth:`compute_goodput_bps`.

    Raises:
      ConfigError: a value is out of its range; begins with its name.
    """

    latency_s: float = 0.0
    bandwidth_bps: Capacity = math.inf
    jitter_s: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        check_seconds("latency_s", self.latency_s)
        check_capacity("bandwidth_bps", self.bandwidth_bps)
        requirement = f"0 or more, and no more than latency_s = {self.latency_s}"
        require(0 <= self.jitter_s <= self.latency_s, "jitter_s", self.jitter_s, requirement)
        require(0 <= self.loss < 1, "loss", self.loss, "a share of packets, at least 0 and below 1")

    def compute_goodput_bps(
        self, round_trip_s: float, control: CongestionControl | None = None, connections: int = 1
    ) -> Capacity:
        r"""Computes the bandwidth of TCP connections under loss, which is modelled as less throughput.

        Retransmissions take their share :math:`p` of the bandwidth :math:`b`, and each of :math:`K` connections gets no
        more than its average window carries: the smaller of :math:`(1-p)\,b` and :math:`K` times
        :func:`farflung.network.compute_window_bps`. A lost packet's own delay is not modelled. Retransmissions are
        charged to this link, not to shared capacities.

        Args:
          round_trip_s: Sum of both delays, in seconds.
          control: Congestion control; None counts as CUBIC.
          connections: Number K of connections.
        """
        if self.loss == 0.0:
            return self.bandwidth_bps
        ceiling = connections * compute_window_bps(control, self.loss, round_trip_s)
        return map_capacity(self.bandwidth_bps, lambda bps: min((1 - self.loss) * bps, ceiling))

    def scale(self, latency: float, bandwidth: float, trace_time: float = 1.0) -> Link:
        """Scales latency with jitter, bandwidth, and the durations of a trace."""
        capacity = scale_capacity(self.bandwidth_bps, bandwidth, trace_time)
        return Link(latency * self.latency_s, capacity, latency * self.jitter_s, self.loss)
