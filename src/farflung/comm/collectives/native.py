"""The backend's all-reduce: gloo or NCCL through torch.distributed."""

from __future__ import annotations

from torch import Tensor

from farflung.errors import Unsupported
from farflung.types import Channel, SegmentCoding

__all__ = ["native"]


async def native(
    channel: Channel, tensor: Tensor, metadata: Tensor, *, coding: SegmentCoding | None = None
) -> tuple[Tensor, Tensor]:
    """Sums by the backend; arguments and result as :func:`farflung.comm.collectives.sharded.direct`.

    The order of additions is the backend's. Codecs cannot run inside it.

    Raises:
      Unsupported: a codec is given, or the communicator has no native collectives.
    """
    if coding is not None:
        raise Unsupported("collective 'native' cannot carry a codec inside it: use ring or direct")
    if channel.size == 1:
        return tensor, metadata
    summed = channel.all_reduce(tensor)
    total_metadata = channel.all_reduce(metadata)
    return await summed, await total_metadata
