"""Tensors, what they become on the way, and the values that travel with them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Json", "Payload", "Placed", "SampleIds", "Segment", "State", "TensorSpec"]

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

    Whoever hands a payload to :meth:`Communicator.send` gives its tensors away: they are not written again until
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
