"""The pace of a device that is slower than this machine: computations idle until the modelled time has passed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from farflung.devices import DeviceProfile, Moment
from farflung.types import Cost, Json

__all__ = ["Pace"]


class Pace:
    """Makes computations end when they would on a device: never before, and no later unless this machine is slower.

    A computation begins, as the model has it, when the one before it or the wait since then has ended; so what lies
    between (fetching samples, updating parameters, a wake-up that came late) is made up for in its idle time.

    Args:
      device: whose pace.
      rank: the replica's.
      seed: of the device's stragglers.
      now: a clock of seconds; from now on when not given.
      sleep: idles for so many seconds.
    """

    def __init__(
        self,
        device: DeviceProfile,
        rank: int,
        seed: int,
        now: Callable[[], float] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.steps = 0
        """Steps paced so far: forward passes begun."""
        self.overran = 0
        """Those of them in which this machine was too slow: a modelled moment had passed before it was computed."""
        self._device, self._rank, self._seed = device, rank, seed
        begin = time.monotonic()
        self._now, self._sleep = now or (lambda: time.monotonic() - begin), sleep
        self._free_at: float | None = None
        self._late = False

    def begin(self, cost: Cost) -> tuple[float, float]:
        """When a computation begins and ends in the model."""
        if cost.kind == "forward":
            self.steps += 1
            self._late = False
        begin = self._now() if self._free_at is None else self._free_at
        return begin, begin + self._device.seconds(cost, Moment(self._seed, self._rank, self.steps, begin))

    def computed(self, moment: float) -> None:
        """Something of a step is computed that the model has at ``moment``; where that has passed, the step overran."""
        if self._now() > moment and not self._late:
            self._late = True
            self.overran += 1

    def until(self, moment: float) -> None:
        """Idles until a modelled moment of the computation under way."""
        left = moment - self._now()
        if left > 0:
            self._sleep(left)

    def end(self, ends: float) -> None:
        """Idles until a computation's modelled end."""
        self.until(ends)
        self._free_at = ends

    def ready_at(self, order: Sequence[int], numels: Sequence[int]) -> list[float]:
        return self._device.ready_at(order, numels)

    def waited(self) -> None:
        """The replica has waited for something that is not its own computation, until now."""
        self._free_at = self._now()

    def to_json(self) -> dict[str, Json]:
        return {"device": self._device.name, "steps": self.steps, "overran": self.overran}
