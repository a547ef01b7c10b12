"""What the collectives share: cutting a flat tensor, putting a segment on the wire, summing in rank order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from farflung.errors import ProtocolError
from farflung.types import Channel, Codec, CodecState, Payload, TensorSpec

__all__ = ["Segment", "Wire", "cut", "pieces_of", "sum_in_order"]

PIECE_NBYTES = 1 << 20
"""What is sent is cut into pieces of about this size, so that work on the first starts before the last has come."""
MAX_PIECES = 8


@dataclass(frozen=True, slots=True)
class Segment:
    """``length`` elements of a flat tensor from ``start`` on."""

    start: int
    length: int

    def of(self, tensor: Tensor) -> Tensor:
        """The view."""
        return tensor.narrow(0, self.start, self.length)


def cut(numel: int, parts: int, start: int = 0) -> list[Segment]:
    """``parts`` segments that differ in length by at most one element, the longer ones first."""
    base, longer = divmod(numel, parts)
    segments = []
    for index in range(parts):
        length = base + (index < longer)
        segments.append(Segment(start, length))
        start += length
    return segments


def pieces_of(nbytes: int) -> int:
    """Into how many pieces to cut ``nbytes``."""
    return min(MAX_PIECES, max(1, nbytes // PIECE_NBYTES))


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum, first to last, in a fresh tensor."""
    if len(parts) == 1:
        return parts[0].clone()
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


class Wire:
    """Segments over a channel, encoded where a codec is given, with the side vector where it rides along.

    Only codecs with ``per_hop`` work here: a segment is encoded anew on every hop.
    """

    def __init__(self, channel: Channel, codec: Codec | None, step: int) -> None:
        self._channel, self._codec, self._step = channel, codec, step

    def pack(self, segment: Tensor, count: int) -> Tensor | Payload:
        """A segment that sums ``count`` ranks, ready to send."""
        if self._codec is None:
            return segment
        return self._codec.encode(CodecState(), segment, step=self._step, count=count)[0]

    def unpack(self, packed: Tensor | Payload, like: Tensor, count: int) -> Tensor:
        """The dense segment again, of the shape and dtype of ``like``."""
        if self._codec is None:
            assert isinstance(packed, Tensor)
            return packed
        assert isinstance(packed, Payload)
        return self._codec.decode(CodecState(), packed, TensorSpec.of(like), step=self._step, count=count)

    def send(self, packed: Tensor | Payload, dst: int, hop: int, side: Tensor | None = None) -> None:
        """Starts sending; nobody waits for the end of it, since the tensors are given away."""
        self._channel.send(Payload((packed,) if side is None else (packed, side)), dst, hop)

    async def recv(self, src: int, hop: int, like: Tensor) -> tuple[Tensor | Payload, Tensor | None]:
        """A packed segment, ``like`` when it is dense, and the side vector where it came along."""
        payload = await self._channel.recv(src, hop)
        packed, *rest = payload.parts
        if isinstance(packed, Tensor) == (self._codec is None):
            if isinstance(packed, Payload) or (packed.dtype == like.dtype and packed.shape == like.shape):
                side = rest[0] if rest else None
                assert side is None or isinstance(side, Tensor)
                return packed, side
        raise ProtocolError(
            f"rank {src} sent another kind of segment than was due: do all ranks run the same model and recipe?"
        )
