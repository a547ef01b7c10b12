"""Tensors, what they become on the way, and the values that travel with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["Json", "Payload", "SampleIds", "State", "TensorSpec"]

Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"
"""What JSON can say."""
State: TypeAlias = "dict[str, Any]"
"""What a checkpoint keeps of a part: nested dicts with string keys; leaves are tensors or JSON values."""
SampleIds: TypeAlias = Tensor
"""Indices into a data set, shape ``(n,)``, int64."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The shape and dtype of a dense tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        """The spec of ``tensor``."""
        return TensorSpec(tuple(tensor.shape), tensor.dtype)

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for dim in self.shape:
            count *= dim
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return self.numel * self.dtype.itemsize


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
        return sum(tensor.nbytes for tensor in self.tensors())
