"""The reducer around a codec: one all-reduce, encoded on its way."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from farflung.codecs import Identity
from farflung.comm import COLLECTIVES
from farflung.errors import Unsupported
from farflung.types import Channel, Codec, CodecState, Contribution, Reduced, Seeds, StateSlot, TensorSpec

__all__ = ["CodecReducer"]


@dataclass(frozen=True, slots=True)
class CodecReducer:
    r"""Weighted mean by one collective, with a codec inside it.

    .. math:: \bar g = \sum_i w_i g_i \,/\, \sum_i w_i

    Numerator and weight sum travel in one exchange; the division comes after the sum.

    Args:
      codec: how segments are encoded; a stateless one runs on every hop of the collective.
      collective: a name in :data:`farflung.comm.COLLECTIVES`.

    Raises:
      Unsupported: the collective cannot carry the codec.
    """

    codec: Codec = field(default_factory=Identity)
    collective: str = "direct"

    def __post_init__(self) -> None:
        if not self.codec.stateless:
            raise Unsupported(
                f"codec {self.codec!r} keeps state and cannot run inside collective {self.collective}"
            )
        if self.collective == "native" and not isinstance(self.codec, Identity):
            raise Unsupported("collective 'native' cannot carry a codec inside it: use ring or direct")

    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """The codec's."""
        return self.codec.init(spec, seeds)

    async def reduce(self, channel: Channel, slot: StateSlot, own: Contribution, *, step: int) -> Reduced:
        """One all-reduce."""
        tensor = own.tensor if own.weight == 1.0 else own.tensor.mul_(own.weight)
        side = torch.cat((torch.tensor([own.weight], dtype=torch.float64), own.rider))
        inside = None if isinstance(self.codec, Identity) else self.codec
        total, sides = await COLLECTIVES[self.collective](channel, tensor, side, codec=inside, step=step)
        weight = float(sides[0])
        return Reduced(total if weight in (0.0, 1.0) else total.div_(weight), weight, sides[1:])
