"""What a reducer has summed in one exchange."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from farflung.comm import AUTO
from farflung.tasks import Pending, done
from farflung.types import (
    AllReduce,
    Channel,
    Contribution,
    Feature,
    Payload,
    Reducer,
    Seeds,
    SegmentCoding,
    StateSlot,
    Tag,
    TensorSpec,
)

__all__ = ["summed_nbytes"]

_LATE = 1 << 20
"""A step at which no method warms up any more."""


def summed_nbytes(reducer: Reducer, specs: Iterable[TensorSpec], size: int) -> list[int]:
    """Bytes of each tensor that the collective ``auto`` sums in a step, for :func:`farflung.comm.resolve_collective`.

    Found by letting the reducer carry zeros where nobody else is, up to the first message that it waits for. What is
    encoded inside a sum does not count, for that is always ``direct``. Where a reducer waits before it sums anything,
    the bucket itself counts.

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
        found += alone.summed or ([] if alone.encoded else [spec.nbytes])
    return found


class _Alone:
    """A channel on which nothing arrives, and sums come out as they went in."""

    features: frozenset[Feature] = frozenset({"tags", "any_source"})
    rank = 0
    auto = "direct"

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent_nbytes = 0
        self.summed: list[int] = []
        """What was summed by ``auto``, in bytes."""
        self.encoded = False
        """Whether something was encoded inside a sum."""
        self._next_hop = 0

    def tag(self, hop: int) -> Tag:
        return Tag(0, 0, hop)

    def hops(self, count: int) -> int:
        self._next_hop += count
        return self._next_hop - count

    def send(self, payload: Payload, dst: int, hop: int) -> Pending[None]:
        del payload, dst, hop
        return done(None)

    def recv(
        self, src: int | None, hop: int, expect: tuple[TensorSpec, ...] | None = None
    ) -> Pending[Payload]:
        del src, hop, expect
        return Pending()

    def collective(self, name: str) -> AllReduce:
        async def unsummed(
            channel: Channel, tensor: Tensor, side: Tensor, *, coding: SegmentCoding | None = None
        ) -> tuple[Tensor, Tensor]:
            del channel
            if coding is not None:
                self.encoded = True
            elif name == AUTO:
                self.summed.append(tensor.nbytes)
            return tensor, side

        return unsummed

    def all_reduce(self, tensor: Tensor) -> Pending[Tensor]:
        return done(tensor)
