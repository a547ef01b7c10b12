"""A learning rate that falls by half a cosine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from typing_extensions import override

from farflung.rates.falling import Falling

__all__ = ["Cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine(Falling):
    r"""Falls slowly at first and at the end.

    .. math:: c(n) = f + \frac{1 - f}{2} \left(1 + \cos \pi \frac{n - W}{N - W}\right)

    with f the final share, W the warm-up and N its end.

    Args:
      warmup: steps or samples of a straight rise; see :class:`farflung.rates.WarmUp`.
      by: what is counted.
      final: the share of the rate that is left at the end, in [0, 1].
      until: steps or samples after which ``final`` is reached; the whole run when not given.

    References: Loshchilov & Hutter 2017 (SGDR), eq. 5, without restarts.
    """

    @override
    def _course(self, done: int, total: int) -> float:
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * self._fallen(done, total))) / 2
