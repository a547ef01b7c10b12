"""Schedule of delayed updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from farflung.errors import ConfigError
from farflung.options import check_fraction, check_integer
from farflung.schedules.merges import Pull, Swap
from farflung.types import (
    Bucket,
    Merge,
    Schedule,
    SharedStats,
    State,
    SyncUnit,
    Transfer,
)

__all__ = ["Delayed"]


FIRST_CHOICE, CHOICE_PERIOD = 4, 32
"""First exchange at which a delay is chosen, and number of exchanges between two choices."""


@dataclass(frozen=True, slots=True)
class Delayed(Schedule):
    r"""Each replica applies its own updates immediately, and merges their mean when it arrives.

    After each block of K steps the exchange of :math:`B_j`, the sum of the block's applied updates, starts. The mean
    arrives ``delay`` steps later and moves an anchor a, bit-identical on all ranks. With :math:`u_j` the updates since
    the last block, :math:`\mu` the optimizer's momentum (Adam: its first beta) and D the current delay:

    .. math::
        \text{swap: } & w_j \leftarrow w_j + \bar B - B_j, \ \rho = \min\left(1 - \mu, \tfrac{1}{D + K + 1}\right) \\
        \text{pull: } & w_j - u_j \leftarrow (1 - \rho)^K (w_j - u_j) + (1 - (1 - \rho)^K)\, a

    The documentation's page on delayed updates has stable learning rates and memory.

    Args:
      delay: Number of steps between the start of an exchange and its use. ``"auto"`` begins with 0, and one decider
        chooses at the fourth and every 32nd exchange: the time of an exchange over that of a step, rounded up.
      period: K, number of steps in a block.
      max_delay: Maximum delay that ``"auto"`` may choose.
      pull: ``"auto"`` for the pull with :math:`\rho` as above; a number for :math:`\rho`, above 0 and at most 1; or
        ``"swap"``.
      warmup: Number of first steps whose results are due immediately: synchronous SGD up to rounding.

    Raises:
      ConfigError: an option is out of range.

    References: Zhu et al. 2019 (DTS); Zhu et al. 2021 (DGA), Alg. 1. Applied updates, anchor and pull are our choice.
    """

    delay: int | str = 4
    period: int = 1
    max_delay: int = 64
    pull: float | str = "auto"
    warmup: int = 0

    def __post_init__(self) -> None:
        if self.delay != "auto":
            if isinstance(self.delay, str):
                raise ConfigError(f"delayed: delay {self.delay!r} must be a whole number or 'auto'")
            check_integer("delayed", "delay", self.delay, 0)
        check_integer("delayed", "period", self.period, 1)
        check_integer("delayed", "max_delay", self.max_delay, 1)
        check_integer("delayed", "warmup", self.warmup, 0)
        if self.pull not in ("swap", "auto"):
            if isinstance(self.pull, str):
                raise ConfigError(f"delayed: pull {self.pull!r} must be 'swap', 'auto' or a share")
            check_fraction("delayed", "pull", self.pull)

    @override
    def check(self, size: int) -> None:
        """Rejects a single replica, which would be pulled towards its own past.

        Raises:
          ConfigError: the run has one replica; the message has an alternative.
        """
        if size == 1:
            raise ConfigError(
                "schedule delayed averages replicas, and there is one: use --workers 2 or more, or schedule synchronous"
            )

    @property
    @override
    def merges(self) -> tuple[Merge, ...]:
        """Swap or pull."""
        return (self._merge,)

    @property
    @override
    def has_late_results(self) -> bool:
        """Returns True with a delay, or one that is chosen later."""
        return self.delay != 0

    @override
    def build_units(self, buckets: Sequence[Bucket]) -> Sequence[SyncUnit]:
        return buckets

    @override
    def init(self) -> State:
        """Returns the initial delay, and the earliest step at which a result may be due."""
        return {"delay": 0 if isinstance(self.delay, str) else self.delay, "earliest_step": 0}

    @property
    @override
    def cycle_steps(self) -> int:
        return self.period

    @property
    @override
    def max_steps_ahead(self) -> int:
        return 0 if isinstance(self.delay, str) else self.delay + self.period

    @override
    def plan(self, state: State, units: Sequence[SyncUnit], step: int) -> list[Transfer]:
        """Returns one transfer for each bucket at the end of a block, or without delay at every step of the warm-up."""
        merge_step = step
        if step >= self.warmup:
            if (step + 1) % self.period:
                return []
            merge_step = max(step + state["delay"], state["earliest_step"])
        return [Transfer(unit, merge_step, self._merge) for unit in units]

    @override
    def needs_times(self, state: State, step: int) -> bool:
        """Returns True for exchanges at which a delay is chosen."""
        del state
        number, remainder = divmod(step + 1, self.period)
        return (
            self.delay == "auto"
            and not remainder
            and number >= FIRST_CHOICE
            and (number - FIRST_CHOICE) % CHOICE_PERIOD == 0
        )

    @override
    def update_state(self, state: State, stats: SharedStats) -> State:
        """Chooses a delay if the stats have times; results stay in order if it becomes shorter."""
        if stats.step_s is None or stats.exchange_s is None:
            return state
        delay = math.ceil(stats.exchange_s / stats.step_s) if stats.step_s > 0 else self.max_delay
        earliest_step = max(state["earliest_step"], stats.step + 2 * int(state["delay"]))
        return {**state, "delay": min(delay, self.max_delay), "earliest_step": earliest_step}

    @property
    def _merge(self) -> Merge:
        if self.pull == "swap":
            return Swap()
        return Pull(None if isinstance(self.pull, str) else self.pull, self.period)
