"""A learning rate that falls in a straight line."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from farflung.rates.falling import Falling

__all__ = ["Linear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(Falling):
    r"""Falls as far at every step, or with every sample.

    .. math:: c(n) = 1 - (1 - f)\,\frac{n - W}{N - W}

    with f the final share, W the warm-up and N its end.

    Args:
      warmup: steps or samples of a straight rise; see :class:`farflung.rates.WarmUp`.
      by: what is counted.
      final: the share of the rate that is left at the end, in [0, 1].
      until: steps or samples after which ``final`` is reached; the whole run when not given.
    """

    @override
    def _course(self, done: int, total: int) -> float:
        return 1 - (1 - self.final) * self._fallen(done, total)
