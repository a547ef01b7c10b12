"""Capacity over time."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from farflung.errors import ConfigError

__all__ = ["After", "Capacity", "Trace", "capacity_at", "check_capacity", "map_capacity", "mean_capacity"]

After: TypeAlias = Literal["error", "hold", "repeat"]
"""What follows a trace: the run ends with an error, the last value stays, or it begins anew."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Bits per second as steps over time.

    Args:
      times_s: when each value begins, in seconds, ascending from 0.
      bandwidth_bps: the values; 0 is an outage.
      end_s: when the last value ends.
      after: what follows then.
      name: for messages.

    Raises:
      ConfigError: it begins late, is out of order, has a negative value, or ends in an outage for good.
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
        if not (self.times_s[-1] < self.end_s and math.isfinite(self.end_s)):
            raise ConfigError(f"end_s = {self.end_s}: must be after the last of times_s")
        for bps in self.bandwidth_bps:
            if not (bps >= 0 and math.isfinite(bps)):
                raise ConfigError(f"bandwidth_bps = {bps}: must be a number of bits per second, 0 or more")
        if self.after not in get_args(After):
            raise ConfigError(f"after = {self.after!r}: must be one of {', '.join(get_args(After))}")
        if not any(self.bandwidth_bps) or (self.after == "hold" and self.bandwidth_bps[-1] == 0):
            raise ConfigError("bandwidth_bps stays at 0: nothing would ever arrive")

    def at(self, t: float) -> float:
        """Bits per second at ``t``.

        Raises:
          ConfigError: the trace ended before.
        """
        if t >= self.end_s:
            if self.after == "error":
                raise ConfigError(
                    f"{self.name}: ends at {self.end_s:g} s and the run goes on: make it longer, or say "
                    'after = "repeat" or after = "hold"'
                )
            if self.after == "hold":
                return self.bandwidth_bps[-1]
        round_begin = self._round(t)
        return self.bandwidth_bps[self._step(round_begin, t)]

    def next_change(self, t: float) -> float:
        """When the next step begins, later than ``t``; infinity where none does."""
        if self.after == "hold" and t >= self.times_s[-1]:
            return math.inf
        round_begin = self._round(t) if self.after == "repeat" else 0.0
        following = self._step(round_begin, t) + 1
        if following < len(self.times_s):
            return round_begin + self.times_s[following]
        return round_begin + self.end_s

    @property
    def mean_bps(self) -> float:
        """The mean over its length."""
        ends = (*self.times_s[1:], self.end_s)
        steps = zip(self.times_s, ends, self.bandwidth_bps, strict=True)
        return math.fsum((end - begin) * bps for begin, end, bps in steps) / self.end_s

    def map(self, change: Callable[[float], float]) -> Trace:
        """The same steps with other values."""
        return replace(self, bandwidth_bps=tuple(change(bps) for bps in self.bandwidth_bps))

    def stretched(self, factor: float) -> Trace:
        """The same values, each for ``factor`` times as long."""
        return replace(self, times_s=tuple(factor * t for t in self.times_s), end_s=factor * self.end_s)

    def _round(self, t: float) -> float:
        """When the repetition that ``t`` falls in began; found by the sums that :meth:`next_change` returns."""
        if t < self.end_s:
            return 0.0
        count = int(t // self.end_s)
        while count * self.end_s > t:
            count -= 1
        while (count + 1) * self.end_s <= t or count * self.end_s + self.end_s <= t:
            count += 1
        return count * self.end_s

    def _step(self, round_begin: float, t: float) -> int:
        starts = [round_begin + begin for begin in self.times_s]
        return max(0, bisect_right(starts, t) - 1)


Capacity: TypeAlias = float | Trace
"""Bits per second, constant or over time; infinity: no limit."""


def check_capacity(name: str, capacity: Capacity) -> None:
    """Whether a constant is above 0; traces are checked where they are made.

    Raises:
      ConfigError: it is not; begins with ``name``.
    """
    if not isinstance(capacity, Trace) and not capacity > 0:
        raise ConfigError(f"{name} = {capacity}: must be above 0 bits per second")


def capacity_at(capacity: Capacity, t: float) -> float:
    """Bits per second at ``t``."""
    return capacity.at(t) if isinstance(capacity, Trace) else capacity


def mean_capacity(capacity: Capacity) -> float:
    """Bits per second on average."""
    return capacity.mean_bps if isinstance(capacity, Trace) else capacity


def map_capacity(capacity: Capacity, change: Callable[[float], float]) -> Capacity:
    """The same over time, with other values."""
    if isinstance(capacity, Trace):
        return capacity.map(change)
    return change(capacity)
