"""What a reducer has summed in one exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from farflung.comm import AUTO
from farflung.tasks import Pending, done
from farflung.types import (
    AllReduce,
    Channel,
    CodingCost,
    Contribution,
    Counts,
    Payload,
    Reducer,
    Seeds,
    SegmentCoding,
    StateSlot,
    Tag,
    TensorSpec,
)

__all__ = ["summed_nbytes"]

T = TypeVar("T")

_LATE = 1 << 20
"""A step at which no method warms up any more."""


def summed_nbytes(reducer: Reducer, specs: Iterable[TensorSpec], size: int) -> list[int]:
    """Bytes of each tensor that the collective ``auto`` sums in a step, for :func:`farflung.comm.resolve_collective`.

    Found by letting the reducer carry zeros in a world of one rank, up to the first payload that it waits for. What is
    encoded inside a sum does not count, for that is always ``direct``.

    Args:
      reducer: of the run; its settings alone matter.
      specs: of a step's buckets.
      size: number of replicas.
    """
    found = []
    for spec in specs:
        alone = _Alone(size)
        slot = StateSlot(reducer.init(spec, Seeds(0, 0)))
        own = Contribution(
            torch.zeros(spec.shape, dtype=spec.dtype), 1.0, torch.zeros(0, dtype=torch.float64)
        )
        carried = reducer.reduce(alone, slot, own, step=_LATE)
        try:
            carried.send(None)
        except StopIteration:
            pass
        finally:
            carried.close()
        found += alone.summed
    return found


class _Alone:
    """A channel on which sums come out as they went in, and nothing arrives but single tensors that are expected."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.auto: Mapping[int, str] = {}
        self.sent_nbytes = 0
        self.summed: list[int] = []
        """What was summed by ``auto``, in bytes."""
        self._next_hop = 0

    def tag(self, hop: int) -> Tag:
        return Tag(0, 0, hop)

    def hops(self, count: int) -> int:
        self._next_hop += count
        return self._next_hop - count

    def compute(self, cost: CodingCost, fn: Callable[[], T]) -> T:
        del cost
        return fn()

    def computed(self) -> Pending[None]:
        return done(None)

    def send(self, payload: Payload, dst: int, hop: int) -> Pending[None]:
        del payload, dst, hop
        return done(None)

    def count(self, nbytes: Counts, *, for_it: bool = False) -> None:
        del nbytes, for_it

    def recv(self, src: int, hop: int, expect: tuple[TensorSpec, ...] | None = None) -> Pending[Payload]:
        del src, hop
        if expect is None or len(expect) > 1:
            return Pending()
        (spec,) = expect
        return done(Payload((torch.zeros(spec.shape, dtype=spec.dtype),)))

    def land(self, src: int, hop: int, into: Tensor) -> None:
        del src, hop, into

    def collective(self, name: str) -> AllReduce:
        async def unsummed(
            channel: Channel, tensor: Tensor, side: Tensor, *, coding: SegmentCoding | None = None
        ) -> tuple[Tensor, Tensor]:
            del channel
            if coding is None and name == AUTO:
                self.summed.append(tensor.nbytes)
            return tensor, side

        return unsummed

    def all_reduce(self, tensor: Tensor) -> Pending[Tensor]:
        return done(tensor)
