"""Bytes by destination and kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Counts", "Sent"]

Counts: TypeAlias = "npt.NDArray[np.int64]"
"""Bytes to each rank, in the order of ranks."""

_EACH = slice(None)


class Sent:
    """Payload bytes that one rank has sent, by the kind of message and by who it was for.

    >>> sent = Sent(3, {"evaluation": [0, 16, 16]})
    >>> sent.add("gradients", 840, 2)
    >>> sent.to_json()
    {'evaluation': [0, 16, 16], 'gradients': [0, 0, 840]}

    Args:
      size: number of ranks.
      nbytes: what to begin with, as :meth:`to_json` gives it.
    """

    def __init__(self, size: int, nbytes: Mapping[str, Sequence[int]] | None = None) -> None:
        import numpy as np

        self._size = size
        self._counts: dict[str, Counts] = {}
        for kind, counts in (nbytes or {}).items():
            self.add(kind, np.array(counts, dtype=np.int64))

    def add(self, kind: str, nbytes: int | Counts, dst: int | slice = _EACH) -> None:
        """Counts what was sent to ``dst``, or to each rank what was sent to it."""
        import numpy as np

        counts = self._counts.get(kind)
        if counts is None:
            counts = self._counts[kind] = np.zeros(self._size, dtype=np.int64)
        counts[dst] += nbytes

    def add_all(self, other: Sent) -> None:
        """Counts what another has counted."""
        for kind, counts in other._counts.items():
            self.add(kind, counts)

    def to_json(self) -> dict[str, list[int]]:
        """For each kind of which anything was sent, by name, the bytes to each rank; callable from any thread."""
        return {kind: counts.tolist() for kind, counts in sorted(self._counts.copy().items()) if counts.any()}
