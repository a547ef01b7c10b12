"""Tensors, payloads and counts of sent bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import Tensor

__all__ = [
    "Counts",
    "Json",
    "ParameterSpan",
    "Payload",
    "SampleIds",
    "Segment",
    "SentBytes",
    "State",
    "TensorSpec",
]


Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"
"""JSON value."""
State: TypeAlias = "dict[str, Any]"
"""Part of a checkpoint: nested dicts with string keys whose leaves are tensors or JSON values."""
SampleIds: TypeAlias = "Tensor"
"""Indices into a data set, shape ``(n,)``, int64."""


class ParameterSpan(NamedTuple):
    """Shape of a parameter and position of its first element in a flat tensor."""

    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def _get_float32() -> torch.dtype:
    import torch

    return torch.float32


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a dense tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype = field(default_factory=_get_float32)
    spans: tuple[ParameterSpan, ...] = field(default=(), compare=False)
    """Parameters of a flat bucket in order; empty if unknown. Not compared between specs."""

    @staticmethod
    def from_tensor(tensor: Tensor) -> TensorSpec:
        """Returns the spec of ``tensor``."""
        return TensorSpec(tuple(tensor.shape), tensor.dtype)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the dense tensor."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Segment:
    """Range of ``length`` elements of a flat tensor from ``start``."""

    start: int
    length: int

    def narrow(self, tensor: Tensor) -> Tensor:
        """Returns the segment as a view of ``tensor``."""
        return tensor.narrow(0, self.start, self.length)


@dataclass(frozen=True, slots=True)
class Payload:
    """Ordered tree of tensors to send. Codecs nest, so a part may be a payload itself.

    A caller that hands a payload to :meth:`Communicator.send` gives its tensors away: they must not be written again
    until every receiver has provably read them.
    """

    parts: tuple[Tensor | Payload, ...]

    def iter_tensors(self) -> Iterator[Tensor]:
        """Yields the tensors, depth first."""
        for part in self.parts:
            if isinstance(part, Payload):
                yield from part.iter_tensors()
            else:
                yield part

    @property
    def nbytes(self) -> int:
        """Number of bytes of all tensors."""
        return sum([part.nbytes for part in self.parts])


Counts: TypeAlias = "npt.NDArray[np.int64]"
"""Bytes to each rank, in the order of ranks."""

_ALL_RANKS = slice(None)


class SentBytes:
    """Payload bytes that one rank has sent, by kind of message and receiving rank.

    >>> sent = SentBytes(3, {"evaluation": [0, 16, 16]})
    >>> sent.add("gradients", 840, 2)
    >>> sent.to_json()
    {'evaluation': [0, 16, 16], 'gradients': [0, 0, 840]}

    Args:
      size: Number of ranks.
      nbytes: Initial counts in the form of :meth:`to_json`.
    """

    def __init__(self, size: int, nbytes: Mapping[str, Sequence[int]] | None = None) -> None:
        import numpy as np

        self._size = size
        self._counts: dict[str, Counts] = {}
        for kind, counts in (nbytes or {}).items():
            self.add(kind, np.array(counts, dtype=np.int64))

    def add(self, kind: str, nbytes: int | Counts, dst: int | slice = _ALL_RANKS) -> None:
        """Adds bytes sent to ``dst``; without it, one number for each rank, or the same number for all ranks."""
        import numpy as np

        counts = self._counts.get(kind)
        if counts is None:
            counts = self._counts[kind] = np.zeros(self._size, dtype=np.int64)
        counts[dst] += nbytes

    def add_all(self, source: SentBytes) -> None:
        """Adds the counts of another instance."""
        for kind, counts in source._counts.items():
            self.add(kind, counts)

    def to_json(self) -> dict[str, list[int]]:
        """Returns the bytes to each rank by kind of message, sorted; callable from any thread."""
        return {kind: counts.tolist() for kind, counts in sorted(self._counts.copy().items()) if counts.any()}
