"""Pace of a device that is slower than this machine: computations idle until the modelled time has passed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from farflung.devices import DeviceProfile, Moment
from farflung.types import Cost, Json

__all__ = ["Pace"]


class Pace:
    """Clock that ends computations at a device's modelled time: never before, and later only on a slower machine.

    In the model, a computation begins at the end of the previous one or of the wait since then. Its idle time
    therefore absorbs the work in between: fetching samples, updating parameters, a late wake-up.

    Args:
      device: Device with the pace.
      rank: Rank of the replica.
      seed: Seed of the device's stragglers.
      read_clock: Function that returns seconds; by default since the creation of this object.
      sleep: Function that idles for some seconds.
    """

    def __init__(
        self,
        device: DeviceProfile,
        rank: int,
        seed: int,
        read_clock: Callable[[], float] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.steps = 0
        """Number of paced steps, by the forward passes begun."""
        self.num_overruns = 0
        """Number of steps in which this machine was too slow: a modelled time had passed before its computation."""
        self._device, self._rank, self._seed = device, rank, seed
        begin = time.monotonic()
        self._read_clock, self._sleep = read_clock or (lambda: time.monotonic() - begin), sleep
        self._free_s: float | None = None
        self._is_late = False

    def begin(self, cost: Cost) -> tuple[float, float]:
        """Returns the modelled begin and end of a computation."""
        if cost.kind == "forward":
            self.steps += 1
            self._is_late = False
        begin = self._read_clock() if self._free_s is None else self._free_s
        return begin, begin + self._device.compute_seconds(
            cost, Moment(self._seed, self._rank, self.steps, begin)
        )

    def record_overrun(self, time_s: float) -> None:
        """Counts the current step as overrun if a modelled time has passed; counts each step once."""
        if self._read_clock() > time_s and not self._is_late:
            self._is_late = True
            self.num_overruns += 1

    def sleep_until(self, time_s: float) -> None:
        """Sleeps until a time on this clock, in seconds; returns immediately if it has passed."""
        remaining_s = time_s - self._read_clock()
        if remaining_s > 0:
            self._sleep(remaining_s)

    def end_computation(self, end_s: float) -> None:
        """Sleeps until a computation's modelled end; the next one begins at this time, even if it has passed."""
        self.sleep_until(end_s)
        self._free_s = end_s

    def advance(self, seconds: float) -> None:
        """Idles until the device has computed for some seconds since it was free."""
        begin_s = self._read_clock() if self._free_s is None else self._free_s
        self.end_computation(begin_s + seconds)

    def compute_use_shares(self, order: Sequence[int], cost: Cost) -> list[float]:
        return self._device.compute_use_fractions(order, cost)

    def compute_ready_shares(self, order: Sequence[int], numels: Sequence[int]) -> list[float]:
        return self._device.compute_ready_fractions(order, numels)

    def finish_wait(self) -> None:
        """Records the end of a wait for something other than the replica's own computation."""
        self._free_s = self._read_clock()

    def to_json(self) -> dict[str, Json]:
        return {"device": self._device.name, "steps": self.steps, "num_overruns": self.num_overruns}
