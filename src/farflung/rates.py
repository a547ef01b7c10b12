"""Learning-rate schedules over the steps or samples of a run, and scaling by batch size."""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from farflung.errors import ConfigError
from farflung.options import check_integer, check_number
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
    r"""Base of schedules with linear warm-up and a decay.

    .. math:: f(n) = \min\left(1, \frac{n + 1}{W}\right) c(n)

    with n the number of previous steps or samples.

    Args:
      warmup: Number of steps or samples of the warm-up, W; 0 for none.
      unit: Unit of n, W and all other numbers: ``steps``, or ``samples`` drawn by all replicas.

    Raises:
      ConfigError: An option is out of range.

    References: Goyal et al. 2017, section 2.2.
    """

    warmup: int = 0
    unit: Literal["steps", "samples"] = "steps"

    def __post_init__(self) -> None:
        check_integer(self._name, "warmup", self.warmup, 0)
        if self.unit not in ("steps", "samples"):
            raise ConfigError(f"{self._name}: unit {self.unit!r} must be 'steps' or 'samples'")

    @property
    def _name(self) -> str:
        return type(self).__name__.lower()

    def compute_factor(self, progress: int, total: int) -> float:
        rise = min(1.0, (progress + 1) / self.warmup) if self.warmup else 1.0
        return rise * self._compute_decay(progress, total)

    @abstractmethod
    def _compute_decay(self, progress: int, total: int) -> float:
        """Returns the decay factor c(n)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(WarmUp):
    """Constant rate after warm-up.

    Args:
      warmup: Number of steps or samples of the warm-up; see :class:`WarmUp`.
      unit: Unit, ``steps`` or ``samples``.
    """

    @override
    def _compute_decay(self, progress: int, total: int) -> float:
        del progress, total
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decaying(WarmUp):
    """Base of schedules that decay from the end of the warm-up to the end of the run or earlier."""

    final: float = 0.0
    until: int | None = None

    @override
    def __post_init__(self) -> None:
        WarmUp.__post_init__(self)
        check_number(self._name, "final", self.final, 0)
        if self.final > 1:
            raise ConfigError(f"{self._name}: final {self.final!r} must be at most 1")
        if self.until is not None:
            check_integer(self._name, "until", self.until, self.warmup + 1)

    def _compute_decay_share(self, progress: int, total: int) -> float:
        """Returns the completed share of the decay, in [0, 1]."""
        end = total if self.until is None else self.until
        return min(1.0, max(0, progress - self.warmup) / max(1, end - self.warmup))


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(_Decaying):
    r"""Linear decay.

    .. math:: c(n) = 1 - (1 - f)\,\frac{n - W}{N - W}

    with f the final share, W the warm-up and N its end.

    Args:
      warmup: Number of steps or samples of the warm-up; see :class:`WarmUp`.
      unit: Unit, ``steps`` or ``samples``.
      final: Share of the rate at the end, in [0, 1].
      until: Number of steps or samples at which ``final`` is reached; by default the end of the run.
    """

    @override
    def _compute_decay(self, progress: int, total: int) -> float:
        return 1 - (1 - self.final) * self._compute_decay_share(progress, total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine(_Decaying):
    r"""Cosine decay.

    .. math:: c(n) = f + \frac{1 - f}{2} \left(1 + \cos \pi \frac{n - W}{N - W}\right)

    with f the final share, W the warm-up and N its end.

    Args:
      warmup: Number of steps or samples of the warm-up; see :class:`WarmUp`.
      unit: Unit, ``steps`` or ``samples``.
      final: Share of the rate at the end, in [0, 1].
      until: Number of steps or samples at which ``final`` is reached; by default the end of the run.

    References: Loshchilov & Hutter 2017 (SGDR), eq. 5, without restarts.
    """

    @override
    def _compute_decay(self, progress: int, total: int) -> float:
        return (
            self.final
            + (1 - self.final) * (1 + math.cos(math.pi * self._compute_decay_share(progress, total))) / 2
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(WarmUp):
    r"""Step decay, which multiplies the rate by gamma at given points.

    .. math:: c(n) = \gamma^{\lfloor n / E \rfloor} \quad\text{or}\quad \gamma^{|\{m \in M : m \le n\}|}

    Args:
      warmup: Number of steps or samples of the warm-up; see :class:`WarmUp`. Points count from the start of the run.
      unit: Unit, ``steps`` or ``samples``.
      gamma: Factor :math:`\gamma`, above 0.
      every: Number of steps or samples between two points, E.
      milestones: Points M in increasing order, instead of ``every``.

    Raises:
      ConfigError: An option is out of range, or both or none of ``every`` and ``milestones`` are given.
    """

    gamma: float = 0.1
    every: int | None = None
    milestones: Sequence[int] = ()

    @override
    def __post_init__(self) -> None:
        WarmUp.__post_init__(self)
        check_number("step", "gamma", self.gamma, 0)
        if not self.gamma:
            raise ConfigError("step: gamma must be above 0")
        if (self.every is None) == (not self.milestones):
            raise ConfigError("step: give one of every=1000 and milestones=(1000, 2000)")
        if self.every is not None:
            check_integer("step", "every", self.every, 1)
        for milestone in self.milestones:
            check_integer("step", "milestones", milestone, 1)
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ConfigError(f"step: milestones {self.milestones!r} must be strictly increasing")

    @override
    def _compute_decay(self, progress: int, total: int) -> float:
        del total
        if self.every is not None:
            return self.gamma ** (progress // self.every)
        return self.gamma ** bisect_right(self.milestones, progress)


@dataclass(frozen=True, slots=True)
class NoScaling:
    """Constant learning rate for batches of any size."""

    def compute_factor(self, share: float) -> float:
        del share
        return 1.0


@dataclass(frozen=True, slots=True)
class LinearScaling:
    r"""Learning rate in proportion to the batch size: :math:`\eta \sum_i b_i / (n b)`.

    References: Goyal et al. 2017, section 2.1; applied at each step in Tyagi & Swany 2022 (ScaDLES), section IV-A, with
    rates :math:`b_i` and the base batch :math:`n b`.
    """

    def compute_factor(self, share: float) -> float:
        return share


@dataclass(frozen=True, slots=True)
class RootScaling:
    r"""Learning rate in proportion to the root of the batch size: :math:`\eta \sqrt{\sum_i b_i / (n b)}`.

    The noise of a mean falls by that root, so the noise of a step does not depend on the batch size.

    References: Krizhevsky 2014, section 5; Hoffer et al. 2017, section 4.
    """

    def compute_factor(self, share: float) -> float:
        return math.sqrt(share)


RATES: dict[str, Callable[..., RateSchedule]] = {
    "constant": Constant,
    "cosine": Cosine,
    "linear": Linear,
    "step": Step,
}
"""Learning-rate schedules by name."""
SCALINGS: dict[str, Callable[..., RateScaling]] = {
    "none": NoScaling,
    "linear": LinearScaling,
    "root": RootScaling,
}
"""Learning-rate scalings by name."""
