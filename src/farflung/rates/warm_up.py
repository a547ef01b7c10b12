"""What every learning-rate schedule begins with."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

from farflung.errors import ConfigError
from farflung.options import whole_option

__all__ = ["WarmUp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    r"""A straight rise to the learning rate, and a course of its own beside it.

    .. math:: f(n) = \min\left(1, \frac{n + 1}{W}\right) c(n)

    with n the steps or samples done before.

    Args:
      warmup: W, steps or samples until the whole rate is reached; 0: none.
      by: what n and W, and all other numbers, count: ``steps``, or ``samples`` that all replicas have drawn.

    Raises:
      ConfigError: an option out of its range.

    References: Goyal et al. 2017, section 2.2.
    """

    warmup: int = 0
    by: Literal["steps", "samples"] = "steps"

    def __post_init__(self) -> None:
        whole_option(self._name, "warmup", self.warmup, 0)
        if self.by not in ("steps", "samples"):
            raise ConfigError(f"{self._name}: by {self.by!r} must be 'steps' or 'samples'")

    @property
    def _name(self) -> str:
        return type(self).__name__.lower()

    def factor(self, done: int, total: int) -> float:
        """See :class:`farflung.types.RateSchedule`."""
        rise = min(1.0, (done + 1) / self.warmup) if self.warmup else 1.0
        return rise * self._course(done, total)

    @abstractmethod
    def _course(self, done: int, total: int) -> float:
        """c(n)."""
