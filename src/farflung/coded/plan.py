"""How a set of answers is decoded."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from torch import Tensor

__all__ = ["Plan"]


class Plan:
    """One factorisation, for all answers of one set of devices."""

    def apply(self, answers: Mapping[Hashable, Tensor], heights: Sequence[int] | None = None) -> list[Tensor]:
        """K tensors, in the order of the partitions.

        Args:
          answers: (b, c) by who sent it.
          heights: rows of each partition, where they are unlike.
        """
        raise NotImplementedError
