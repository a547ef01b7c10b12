"""Which answers determine all partitions, told as they come."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from farflung.coded.plan import Plan

__all__ = ["Decoder"]


class Decoder:
    """Takes answers until they determine all partitions.

    Args:
      partitions: K.
      max_condition: see :attr:`complete`.
    """

    def __init__(self, partitions: int, max_condition: float = 1e6) -> None: ...

    def add(self, who: Hashable, row: Tensor) -> bool:
        """Takes an answer; whether the rank grew."""
        raise NotImplementedError

    @property
    def complete(self) -> bool:
        """Whether the answers determine all partitions, with an acceptable condition."""
        raise NotImplementedError

    @property
    def rank(self) -> int:
        """Of the answers' rows."""
        raise NotImplementedError

    @property
    def condition(self) -> float:
        """Of the decoding matrix; infinite below full rank."""
        raise NotImplementedError

    @property
    def missing(self) -> tuple[int, ...]:
        """The partitions of which there is no raw answer."""
        raise NotImplementedError

    @property
    def who(self) -> tuple[Hashable, ...]:
        """Those whose answers count."""
        raise NotImplementedError

    def plan(self) -> Plan:
        """How these answers are decoded."""
        raise NotImplementedError
