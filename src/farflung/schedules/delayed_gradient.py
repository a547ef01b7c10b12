"""Delayed gradient averaging on raw gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from farflung.options import whole_option
from farflung.schedules.fixed import Fixed
from farflung.types import Merge, Part, State, SwapGradient, Transfer

__all__ = ["DelayedGradient"]


@dataclass(frozen=True, slots=True)
class DelayedGradient(Fixed):
    r"""Each replica steps on its own gradient, and later on what the mean would have added to it.

    At the end of each block of K steps the sum m of the block's gradients starts on its way. ``delay`` steps later
    the optimizer steps on

    .. math:: g_{n,j} + \bar m - m_j

    For plain SGD with a constant learning rate this is :class:`farflung.schedules.Delayed`. Otherwise it is not: what
    a gradient did at its own step, at another learning rate or through Adam, is not what taking it away undoes, and
    after a drop of the learning rate replicas stay apart for good. There is no anchor either, so rounding drifts.
    It is here for comparison with the papers' algorithm as printed. At the end of a run the parameters are averaged;
    what is under way is dropped, since swaps leave the mean of plain SGD as it is.

    **Learning rate**: replicas part where those of a swap of updates do, so this gains nothing over that. With
    :math:`\lambda` the curvature of a quadratic, and a period of 1, they stay together while :math:`\eta\lambda` is
    below 1 without momentum, whatever the delay, and with momentum 0.9 below 0.22, 0.069, 0.037 and 0.025 at delays of
    5, 10, 15 and 20. Synchronous SGD allows 2, and 3.8 with that momentum. The analysis is ours.

    Holds, for each exchange under way, the block's sum, beside the sum of the block that fills.

    Gradient clipping is refused: an exchange starts before the norm of the whole gradient is known.

    Args:
      delay: steps between the start of an exchange and its use.
      period: K, steps in a block.

    Raises:
      ConfigError: an option out of its range.

    References: Zhu et al. 2019 (DTS), which has K = 1 and later the sum over a block; Zhu et al. 2021 (DGA), Alg. 1,
    whose D is the delay.
    """

    delay: int = 4
    period: int = 1

    merges: ClassVar[tuple[Merge, ...]] = (SwapGradient(),)

    def __post_init__(self) -> None:
        whole_option("delayed_gradient", "delay", self.delay, 0)
        whole_option("delayed_gradient", "period", self.period, 1)

    @property
    @override
    def late(self) -> bool:
        """With a delay."""
        return self.delay > 0

    def plan(self, state: State, parts: Sequence[Part], step: int) -> list[Transfer]:
        """At the end of a block, one transfer for each bucket."""
        del state
        if (step + 1) % self.period:
            return []
        return [Transfer(part, step + self.delay, SwapGradient()) for part in parts]
