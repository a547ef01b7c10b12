"""Learning rates: schedules over the steps or samples of a run, and scaling by the size of a batch."""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from farflung.errors import ConfigError
from farflung.options import number_option, whole_option
from farflung.types import RateScaling, RateSchedule

__all__ = [
    "RATES",
    "SCALINGS",
    "Constant",
    "Cosine",
    "Linear",
    "LinearScaling",
    "NoScaling",
    "RootScaling",
    "Step",
    "WarmUp",
]


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
        rise = min(1.0, (done + 1) / self.warmup) if self.warmup else 1.0
        return rise * self._course(done, total)

    @abstractmethod
    def _course(self, done: int, total: int) -> float:
        """c(n)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(WarmUp):
    """The same rate at every step once it is warm.

    Args:
      warmup: steps or samples of a straight rise; see :class:`WarmUp`.
      by: what is counted.
    """

    @override
    def _course(self, done: int, total: int) -> float:
        del done, total
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Falling(WarmUp):
    """A fall that begins once the rate is warm, and ends at the end of the run or before."""

    final: float = 0.0
    until: int | None = None

    @override
    def __post_init__(self) -> None:
        WarmUp.__post_init__(self)
        number_option(self._name, "final", self.final, 0)
        if self.final > 1:
            raise ConfigError(f"{self._name}: final {self.final!r} must be at most 1")
        if self.until is not None:
            whole_option(self._name, "until", self.until, self.warmup + 1)

    def _fallen(self, done: int, total: int) -> float:
        """The share of the fall that is done, in [0, 1]."""
        end = total if self.until is None else self.until
        return min(1.0, max(0, done - self.warmup) / max(1, end - self.warmup))


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(_Falling):
    r"""Falls as far at every step, or with every sample.

    .. math:: c(n) = 1 - (1 - f)\,\frac{n - W}{N - W}

    with f the final share, W the warm-up and N its end.

    Args:
      warmup: steps or samples of a straight rise; see :class:`WarmUp`.
      by: what is counted.
      final: the share of the rate that is left at the end, in [0, 1].
      until: steps or samples after which ``final`` is reached; the whole run when not given.
    """

    @override
    def _course(self, done: int, total: int) -> float:
        return 1 - (1 - self.final) * self._fallen(done, total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine(_Falling):
    r"""Falls slowly at first and at the end.

    .. math:: c(n) = f + \frac{1 - f}{2} \left(1 + \cos \pi \frac{n - W}{N - W}\right)

    with f the final share, W the warm-up and N its end.

    Args:
      warmup: steps or samples of a straight rise; see :class:`WarmUp`.
      by: what is counted.
      final: the share of the rate that is left at the end, in [0, 1].
      until: steps or samples after which ``final`` is reached; the whole run when not given.

    References: Loshchilov & Hutter 2017 (SGDR), eq. 5, without restarts.
    """

    @override
    def _course(self, done: int, total: int) -> float:
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * self._fallen(done, total))) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(WarmUp):
    r"""Is multiplied by gamma at given points.

    .. math:: c(n) = \gamma^{\lfloor n / E \rfloor} \quad\text{or}\quad \gamma^{|\{m \in M : m \le n\}|}

    Args:
      warmup: steps or samples of a straight rise; see :class:`WarmUp`. The points count from the
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
            raise ConfigError(f"step: milestones {self.milestones!r} must be strictly increasing")

    @override
    def _course(self, done: int, total: int) -> float:
        del total
        if self.every is not None:
            return self.gamma ** (done // self.every)
        return self.gamma ** bisect_right(self.milestones, done)


@dataclass(frozen=True, slots=True)
class NoScaling:
    """The learning rate is the same for batches of any size."""

    def factor(self, share: float) -> float:
        del share
        return 1.0


@dataclass(frozen=True, slots=True)
class LinearScaling:
    r"""The learning rate grows with the batch: :math:`\eta \sum_i b_i / (n b)`.

    References: Goyal et al. 2017, section 2.1; for each step anew Tyagi & Swany 2022 (ScaDLES), section IV-A, where
    :math:`b_i` is a rate and :math:`n b` the base batch.
    """

    def factor(self, share: float) -> float:
        return share


@dataclass(frozen=True, slots=True)
class RootScaling:
    r"""The learning rate grows with the root of the batch: :math:`\eta \sqrt{\sum_i b_i / (n b)}`.

    A mean of more samples has less noise by that root, so a step has as much of it as one of the usual batch.

    References: Krizhevsky 2014, section 5; Hoffer et al. 2017, section 4.
    """

    def factor(self, share: float) -> float:
        return math.sqrt(share)


RATES: dict[str, Callable[..., RateSchedule]] = {
    "constant": Constant,
    "cosine": Cosine,
    "linear": Linear,
    "step": Step,
}
"""Schedules by name."""
SCALINGS: dict[str, Callable[..., RateScaling]] = {
    "none": NoScaling,
    "linear": LinearScaling,
    "root": RootScaling,
}
"""Scalings by name."""
