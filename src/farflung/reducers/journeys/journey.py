"""How a tensor encoded by one codec is summed over the replicas.

A :class:`Journey` begins when it is made: what encoding changes in a state has changed by then, and what can be sent
at once is on its way. So several of them, for the parts of one bucket, overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from farflung.codecs import ErrorFeedback
from farflung.codecs.error_feedback import inner_state
from farflung.comm import Coding
from farflung.comm.staging import on_device
from farflung.errors import Unsupported
from farflung.trees import only_seeds
from farflung.types import Channel, Codec, CodecState, CodingCost, Payload, Seeds

__all__ = ["Exchange", "Journey", "Parcel", "both", "check_cut", "unwrapped"]


@dataclass(frozen=True, slots=True)
class Parcel:
    """What one rank gives to a journey.

    Args:
      codec: encodes it.
      method: what the costs of its encodings are called by.
      state: of the codec.
      tensor: flat; given away.
      seeds: of its segments, where it is cut.
    """

    codec: Codec
    method: str
    state: CodecState
    tensor: Tensor
    seeds: Seeds


@dataclass(frozen=True, slots=True)
class Exchange:
    """What all journeys of one exchange have alike.

    Args:
      channel: the exchange's.
      collective: a name in :data:`farflung.comm.COLLECTIVES`.
      side: float64 numbers, summed in rank order beside the tensor.
      step: for the codecs.
    """

    channel: Channel
    collective: str
    side: Tensor
    step: int

    def encode(self, own: Parcel) -> tuple[Payload, CodecState]:
        """The rank's own tensor, whole."""
        cost = CodingCost("encode", own.method, own.tensor.numel())
        encode = partial(own.codec.encode, own.state, own.tensor, step=self.step, count=1)
        return self.channel.compute(cost, encode)

    async def sum(self, tensor: Tensor, coding: Coding | None = None) -> tuple[Tensor, Tensor]:
        """The sums of a flat tensor, given away, and of the side."""
        all_reduce = self.channel.collective(self.collective)
        return await all_reduce(self.channel, tensor, self.side, coding=coding)


class Journey(Protocol):
    """One tensor on its way."""

    state: CodecState
    """What encoding has left behind."""
    posted: bool
    """Whether it is on its way already, so that others should not wait for its end to begin."""

    async def finish(self) -> tuple[Tensor, Tensor]:
        """The sums of tensor and side, bit-identical on all ranks."""
        ...

    def learn(self, state: CodecState, average: Tensor) -> CodecState:
        """What ``state`` becomes when the result is merged; ``average`` is the sum over the number of ranks."""
        ...


def both(payload: Payload, device: torch.device) -> tuple[Payload, Tensor]:
    """An encoded tensor, on ``device``, and the side that rode with it."""
    encoded, side = payload.parts
    assert isinstance(encoded, Payload)
    assert isinstance(side, Tensor)
    return on_device(encoded, device), side


def unwrapped(codec: Codec, state: CodecState) -> tuple[Codec, CodecState]:
    """What encodes segments; error feedback is left to the journey."""
    if isinstance(codec, ErrorFeedback):
        return codec.codec, inner_state(state)
    return codec, state


def check_cut(codec: Codec, state: CodecState) -> None:
    """Whether a codec can encode segments of a tensor, in two phases or on every hop.

    Raises:
      Unsupported: it keeps something of a whole tensor that a segment's codec would not have.
    """
    inner, inside = unwrapped(codec, state)
    if not only_seeds(inside):
        raise Unsupported(
            f"codec {inner!r} keeps more than seeds between steps and cannot encode segments: use phases='gather'"
        )
