"""Tensors, what they become on the way, the values that travel with them, and counts of what was sent."""

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

__all__ = ["Counts", "Json", "Payload", "Placed", "SampleIds", "Segment", "Sent", "State", "TensorSpec"]


Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"
"""What JSON can say."""
State: TypeAlias = "dict[str, Any]"
"""What a checkpoint keeps of a part: nested dicts with string keys; leaves are tensors or JSON values."""
SampleIds: TypeAlias = "Tensor"
"""Indices into a data set, shape ``(n,)``, int64."""


class Placed(NamedTuple):
    """A parameter's shape, and where its first element is in a flat tensor."""

    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def _float32() -> torch.dtype:
    import torch

    return torch.float32


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The shape and dtype of a dense tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype = field(default_factory=_float32)
    parts: tuple[Placed, ...] = field(default=(), compare=False)
    """What a flat bucket is made of, in its order; empty where that is not known. Specs compare without it."""

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        """The spec of ``tensor``."""
        return TensorSpec(tuple(tensor.shape), tensor.dtype)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Segment:
    """``length`` elements of a flat tensor from ``start`` on."""

    start: int
    length: int

    def of(self, tensor: Tensor) -> Tensor:
        """The view."""
        return tensor.narrow(0, self.start, self.length)


@dataclass(frozen=True, slots=True)
class Payload:
    """What travels: an ordered tree of tensors. Codecs nest, so a part may be a payload itself.

    A caller that hands a payload to :meth:`Communicator.send` gives its tensors away: they are not written again until
    every receiver has provably read them.
    """

    parts: tuple[Tensor | Payload, ...]

    def tensors(self) -> Iterator[Tensor]:
        """The tensors, depth first."""
        for part in self.parts:
            if isinstance(part, Payload):
                yield from part.tensors()
            else:
                yield part

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, counted from the tensors themselves."""
        return sum([part.nbytes for part in self.parts])


Counts: TypeAlias = "npt.NDArray[np.int64]"
"""Bytes to each rank, in the order of ranks."""

_EACH = slice(None)


class Sent:
    """Payload bytes that one rank has sent, by the kind of message and by the rank it was for.

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
