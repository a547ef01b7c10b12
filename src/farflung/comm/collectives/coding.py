"""Segments on the wire: dense, or encoded again on every hop."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from farflung.comm.collectives.segments import sum_in_order
from farflung.comm.staging import copy_to_device
from farflung.errors import ProtocolError
from farflung.seeding import derive_seed
from farflung.types import (
    Channel,
    Codec,
    CodecState,
    Payload,
    Seeds,
    Segment,
    SegmentCoding,
    TensorSpec,
)

__all__ = ["Coding", "SegmentChannel", "with_metadata"]


@dataclass(frozen=True, slots=True)
class Coding:
    """Coding of the segments of one flat tensor; see :class:`farflung.types.SegmentCoding`.

    A segment's codec has a fresh state. Its seeds depend on the segment and on the number of tensors summed in
    it, so sender and receivers have equal ones, and no two encodings round alike by chance.

    Args:
      codec: Codec whose only state between steps is seeds; error feedback is the caller's.
      seeds: Seeds of the tensor.
      step: Step, for the codec.
      residual: Flat tensor of equal length, to which the residuals of this rank's encodings are added, where
        they are finite; None discards them.
      method: Name of the encoding for charges; see :meth:`farflung.types.Channel.charge`.
    """

    codec: Codec
    seeds: Seeds
    step: int
    residual: Tensor | None = None
    method: str = ""

    def encode(self, tensor: Tensor, segment: Segment, count: int) -> Payload:
        """Encodes a segment that sums ``count`` ranks' tensors; does not modify it."""
        spec = TensorSpec.from_tensor(tensor)
        payload, _ = self.codec.encode(
            self._build_state(spec, segment, count), tensor, step=self.step, count=count
        )
        if self.residual is not None:
            sent = self.decode(payload, spec, segment, count)
            segment.narrow(self.residual).add_((tensor - sent).nan_to_num_(0.0, 0.0, 0.0))
        return payload

    def decode(self, payload: Payload, spec: TensorSpec, segment: Segment, count: int) -> Tensor:
        """Decodes a segment to its dense form, bit-identical on all ranks."""
        state = self._build_state(spec, segment, count)
        return self.codec.decode(state, payload, spec, step=self.step, count=count)

    def _build_state(self, spec: TensorSpec, segment: Segment, count: int) -> CodecState:
        if self.codec.is_stateless:
            return CodecState()
        shared, local = self.seeds
        return self.codec.init(
            spec, Seeds(derive_seed(shared, segment.start, count), derive_seed(local, segment.start, count))
        )


def with_metadata(packed: Tensor | Payload, metadata: Tensor | None) -> Payload:
    """Returns the message of a segment, with the metadata if there is any.

    Sending it gives its tensors away: they must not be modified.
    """
    return Payload((packed,) if metadata is None else (packed, metadata))


class SegmentChannel:
    """Transfer of segments over a channel, encoded if there is a coding, and with metadata if there is any."""

    def __init__(self, channel: Channel, coding: SegmentCoding | None) -> None:
        self._channel, self._coding = channel, coding

    def pack(self, tensor: Tensor, segment: Segment, count: int) -> Tensor | Payload:
        """Prepares a segment that sums ``count`` ranks' tensors for sending."""
        if self._coding is None:
            return tensor
        self._channel.charge("encode", segment.length, self._coding.method)
        return self._coding.encode(tensor, segment, count)

    def unpack(self, packed: Tensor | Payload, like: Tensor, segment: Segment, count: int) -> Tensor:
        """Restores the dense segment, of the shape and dtype of ``like``."""
        if self._coding is None:
            assert isinstance(packed, Tensor)
            return packed
        assert isinstance(packed, Payload)
        self._channel.charge("decode", segment.length, self._coding.method)
        return self._coding.decode(packed, TensorSpec.from_tensor(like), segment, count)

    def unpack_into(self, packed: Tensor | Payload, target: Tensor, segment: Segment, count: int) -> None:
        """Restores the dense segment in ``target``."""
        dense = self.unpack(packed, target, segment, count)
        self._channel.charge("copy", segment.length)
        if dense.data_ptr() != target.data_ptr():
            target.copy_(dense)

    async def recv(self, src: int, hop: int, like: Tensor) -> tuple[Tensor | Payload, Tensor | None]:
        """Receives a packed segment that is dense like ``like``, and the metadata if it is included."""
        packed, *extras = (await self._channel.recv(src, hop)).parts
        if isinstance(packed, Tensor) == (self._coding is None):
            if isinstance(packed, Payload) or (packed.dtype == like.dtype and packed.shape == like.shape):
                metadata = extras[0] if extras else None
                assert metadata is None or isinstance(metadata, Tensor)
                (packed,) = copy_to_device(Payload((packed,)), like.device).parts
                return packed, metadata
        raise ProtocolError(
            f"rank {src} sent another kind of segment than was due: do all ranks run the same model and recipe?"
        )

    async def sum(
        self, tensor: Tensor, segment: Segment, hop: int, metadata: Tensor | None, out: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Receives the segments of all other ranks and adds them in rank order, whatever their order of arrival.

        Args:
          tensor: Dense segment of this rank.
          segment: Place of the segment.
          hop: Hop of the other ranks' messages.
          metadata: Metadata of this rank, if it travels with this segment.
          out: Tensor for the sum; a new one when not given.

        Returns:
          The sum, and the metadata in rank order.
        """
        parts, all_metadata = [], []
        for peer in range(self._channel.size):
            if peer == self._channel.rank:
                part, extra = tensor, metadata
            else:
                packed, extra = await self.recv(peer, hop, tensor)
                part = self.unpack(packed, tensor, segment, 1)
            parts.append(part)
            if extra is not None:
                all_metadata.append(extra)
        self._channel.charge("add", (len(parts) - 1) * segment.length)
        return sum_in_order(parts, out), all_metadata
