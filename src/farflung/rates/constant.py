"""A learning rate that stays."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from farflung.rates.warm_up import WarmUp

__all__ = ["Constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(WarmUp):
    """The same rate at every step once it is warm.

    Args:
      warmup: steps or samples of a straight rise; see :class:`farflung.rates.WarmUp`.
      by: what is counted.
    """

    @override
    def _course(self, done: int, total: int) -> float:
        del done, total
        return 1.0
