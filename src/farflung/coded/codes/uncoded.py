"""No coded blocks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from farflung.errors import ConfigError

__all__ = ["Uncoded"]


@dataclass(frozen=True, slots=True)
class Uncoded:
    """The raw blocks alone, each of which is waited for: the identity of the family."""

    def row(self, index: int, partitions: int, seed: int) -> Tensor:
        """There is none.

        Raises:
          ConfigError: always.
        """
        del partitions, seed
        raise ConfigError(
            f"uncoded: there is no coded block {index}; as many devices as partitions, or another code"
        )

    def most(self, partitions: int) -> int | None:
        del partitions
        return 0

    def grown(self, row: Tensor, index: int, seed: int, partitions: int) -> Tensor:
        """There is none.

        Raises:
          ConfigError: always.
        """
        del row
        return self.row(index, partitions, seed)
