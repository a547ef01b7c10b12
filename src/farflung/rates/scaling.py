"""How a step's learning rate follows the number of samples that the step is made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from farflung.types import RateScaling

__all__ = ["SCALINGS", "LinearScaling", "NoScaling", "RootScaling"]


@dataclass(frozen=True, slots=True)
class NoScaling:
    """The learning rate is the same for batches of any size."""

    def factor(self, share: float) -> float:
        """Always 1."""
        del share
        return 1.0


@dataclass(frozen=True, slots=True)
class LinearScaling:
    r"""The learning rate grows with the batch: :math:`\eta \sum_i b_i / (n b)`.

    References: Goyal et al. 2017, section 2.1; for each step anew Tyagi & Swany 2022 (ScaDLES), section IV-A, where
    :math:`b_i` is a rate and :math:`n b` the base batch.
    """

    def factor(self, share: float) -> float:
        """As large as the batch."""
        return share


@dataclass(frozen=True, slots=True)
class RootScaling:
    r"""The learning rate grows with the root of the batch: :math:`\eta \sqrt{\sum_i b_i / (n b)}`.

    A mean of more samples has less noise by that root, so a step has as much of it as one of the usual batch.

    References: Krizhevsky 2014, section 5; Hoffer et al. 2017, section 4.
    """

    def factor(self, share: float) -> float:
        """The root."""
        return math.sqrt(share)


SCALINGS: dict[str, Callable[..., RateScaling]] = {
    "none": NoScaling,
    "linear": LinearScaling,
    "root": RootScaling,
}
"""All of them by name."""
