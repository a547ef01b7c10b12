"""A learning rate that falls in steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from farflung.errors import ConfigError
from farflung.options import number_option, whole_option
from farflung.rates.warm_up import WarmUp

__all__ = ["Step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(WarmUp):
    r"""Is multiplied by gamma at given points.

    .. math:: c(n) = \gamma^{\lfloor n / E \rfloor} \quad\text{or}\quad \gamma^{|\{m \in M : m \le n\}|}

    Args:
      warmup: steps or samples of a straight rise; see :class:`farflung.rates.WarmUp`. The points count from the
        beginning of the run all the same.
      by: what is counted.
      gamma: :math:`\gamma`, above 0.
      every: E, steps or samples between two points.
      milestones: M, the points themselves, in rising order; in the place of ``every``.

    Raises:
      ConfigError: an option out of its range, or not just one of ``every`` and ``milestones``.
    """

    gamma: float = 0.1
    every: int | None = None
    milestones: Sequence[int] = ()

    @override
    def __post_init__(self) -> None:
        WarmUp.__post_init__(self)
        number_option("step", "gamma", self.gamma, 0)
        if not self.gamma:
            raise ConfigError("step: gamma must be above 0")
        if (self.every is None) == (not self.milestones):
            raise ConfigError("step: give one of every=1000 and milestones=(1000, 2000)")
        if self.every is not None:
            whole_option("step", "every", self.every, 1)
        for milestone in self.milestones:
            whole_option("step", "milestones", milestone, 1)
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ConfigError(f"step: milestones {self.milestones!r} must rise")

    @override
    def _course(self, done: int, total: int) -> float:
        del total
        if self.every is not None:
            return self.gamma ** (done // self.every)
        return self.gamma ** bisect_right(self.milestones, done)
