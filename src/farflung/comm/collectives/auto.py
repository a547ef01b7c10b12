"""The ``auto`` collective, which runs the collective that was resolved for the run."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping

from torch import Tensor

from farflung.types import Channel, SegmentCoding

__all__ = ["auto", "choose_default_collective"]

MAX_EXTRA_NBYTES = 1 << 16
"""Most extra bytes that a rank sends to save one delay, our choice; the only criterion for an unknown network."""


def choose_default_collective(nbytes: int, size: int) -> str:
    """Chooses ``all_gather`` if it sends at most 64 KiB more than ``direct`` (always between two), or
    else ``direct``.

    No other collective takes fewer delays, and ``direct`` sends no more than a ring.

    Args:
      nbytes: Bytes of the tensor.
      size: Number of replicas.
    """
    more = (size - 1) * (size - 2) * nbytes // size
    return "all_gather" if more <= MAX_EXTRA_NBYTES else "direct"


def auto(
    names: Mapping[int, str],
    channel: Channel,
    tensor: Tensor,
    metadata: Tensor,
    *,
    coding: SegmentCoding | None = None,
) -> Awaitable[tuple[Tensor, Tensor]]:
    """Sums by the collective that :func:`farflung.comm.resolve_collective` chose for this size when the run was built.

    ``names`` holds the choices by the bytes of a tensor; for other sizes it is :func:`choose_default_collective`.
    With a codec, whose errors depend on the collective, it is always ``direct``. The other arguments and the result
    are those of :func:`farflung.comm.collectives.sharded.direct`.
    """
    name = "direct"
    if coding is None:
        name = names.get(tensor.nbytes) or choose_default_collective(tensor.nbytes, channel.size)
    return channel.get_collective(name)(channel, tensor, metadata, coding=coding)
