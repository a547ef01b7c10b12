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
from farflung.sampling import UniformSampler
from farflung.schedules import Synchronous
from farflung.schedules.merges import Replace
from farflung.types import CodecState, Draw, DrawContext, Payload, State, SyncUnit, Transfer

__all__ = ["Coarse", "Epochs", "Late", "OwnOrder", "halves"]


@dataclass(frozen=True)
class Coarse:
    """Whole multiples of a unit, a byte each."""

    unit: float = 1e-3

    is_unbiased: ClassVar[bool] = False
    is_stateless: ClassVar[bool] = True
    can_requantize: ClassVar[bool] = False

    def init(self, spec: Any, seeds: Any) -> CodecState:
        return CodecState()

    def encode(self, state: Any, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        return Payload(((grad / self.unit).round().clamp(-127, 127).to(torch.int8),)), state

    def decode(self, state: Any, payload: Payload, spec: Any, *, step: int, count: int) -> Tensor:
        (multiples,) = payload.iter_tensors()
        return multiples.to(spec.dtype) * self.unit

    def update_state(self, state: CodecState, aggregate: Tensor, *, step: int) -> CodecState:
        return state

    def is_linear(self, state: CodecState) -> bool:
        return False


@dataclass(frozen=True)
class Late(Synchronous):
    """Each mean so many steps late."""

    steps: int = 1
    has_late_results = True

    @override
    def plan(self, state: State, units: Sequence[SyncUnit], step: int) -> list[Transfer]:
        return [Transfer(part, step + self.steps, Replace()) for part in units]


class OwnOrder(UniformSampler):
    """Passes in an order of their own.

    Args:
      seed: of the run.
      turn: another order.
    """

    def __init__(self, seed: int, turn: int = 0) -> None:
        super().__init__(seed + turn)


class Epochs(UniformSampler):
    """Passes of their own batches: the last one of a pass is smaller, as a ``DataLoader`` has it."""

    @override
    def draw(self, context: DrawContext) -> Draw:
        assert isinstance(context.pool, int)
        begin = self._cursor % context.pool
        each = min(context.batch_size, (context.pool - begin) // context.size)
        drawn = self._list_samples(self._cursor + context.rank * each, each, context.pool)
        last = begin + (each + context.batch_size) * context.size > context.pool and each < context.batch_size
        self._cursor += context.pool - begin if last else each * context.size
        return Draw(drawn)


def halves(side: int = 8) -> farflung.TorchWorkload:
    """On which side of a plane a point is."""
    points = torch.randn(256, side, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(points, (points.sum(dim=1) > 0).long())
    return farflung.TorchWorkload(lambda: nn.Linear(side, 2), data, data, nn.functional.cross_entropy)
