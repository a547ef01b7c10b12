"""Parts of a user's own, which the package knows nothing of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typing_extensions import override

import farflung
from farflung.sampling import Uniform
from farflung.schedules import Synchronous
from farflung.schedules.merges import Replace
from farflung.types import CodecState, Draw, Part, Payload, PoolView, State, Transfer

__all__ = ["Coarse", "Epochs", "Late", "OwnOrder", "halves"]


@dataclass(frozen=True)
class Coarse:
    """Whole multiples of a unit, a byte each."""

    unit: float = 1e-3

    unbiased: ClassVar[bool] = False
    stateless: ClassVar[bool] = True
    per_hop: ClassVar[bool] = False

    def init(self, spec: Any, seeds: Any) -> CodecState:
        return CodecState()

    def encode(self, state: Any, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        return Payload(((grad / self.unit).round().clamp(-127, 127).to(torch.int8),)), state

    def decode(self, state: Any, payload: Payload, spec: Any, *, step: int, count: int) -> Tensor:
        (multiples,) = payload.tensors()
        return multiples.to(spec.dtype) * self.unit

    def observe(self, state: CodecState, aggregate: Tensor, *, step: int) -> CodecState:
        return state

    def linear(self, state: CodecState) -> bool:
        return False


@dataclass(frozen=True)
class Late(Synchronous):
    """Each mean so many steps late."""

    steps: int = 1
    late = True

    @override
    def plan(self, state: State, parts: Sequence[Part], step: int) -> list[Transfer]:
        return [Transfer(part, step + self.steps, Replace()) for part in parts]


class OwnOrder(Uniform):
    """Passes in an order of their own.

    Args:
      seed: of the run.
      turn: another order.
    """

    def __init__(self, seed: int, turn: int = 0) -> None:
        super().__init__(seed + turn)


class Epochs(Uniform):
    """Passes of their own batches: the last one of a pass is smaller, as a ``DataLoader`` has it."""

    @override
    def next(self, view: PoolView) -> Draw:
        assert isinstance(view.pool, int)
        begin = self._cursor % view.pool
        each = min(view.batch_size, (view.pool - begin) // view.size)
        drawn = self._at(self._cursor + view.rank * each, each, view.pool)
        last = begin + (each + view.batch_size) * view.size > view.pool and each < view.batch_size
        self._cursor += view.pool - begin if last else each * view.size
        return Draw(drawn)


def halves(side: int = 8) -> farflung.TorchWorkload:
    """On which side of a plane a point is."""
    points = torch.randn(256, side, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(points, (points.sum(dim=1) > 0).long())
    return farflung.TorchWorkload(lambda: nn.Linear(side, 2), data, data, nn.functional.cross_entropy)
