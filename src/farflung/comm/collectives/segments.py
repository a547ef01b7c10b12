"""Segments: cuts a flat tensor, and sums in rank order, for all collectives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from farflung.comm.pool import allocate_like
from farflung.types import Channel, Segment

__all__ = ["cut_segments", "list_peers", "sum_in_order"]


def cut_segments(numel: int, parts: int, start: int = 0) -> list[Segment]:
    """Cuts a flat tensor into segments that differ in length by at most one element, the longer ones first."""
    base, longer = divmod(numel, parts)
    segments = []
    for index in range(parts):
        length = base + (index < longer)
        segments.append(Segment(start, length))
        start += length
    return segments


def list_peers(channel: Channel) -> list[int]:
    """Lists the other ranks, starting with each rank's next neighbour so that not all send to the same one."""
    return [(channel.rank + offset) % channel.size for offset in range(1, channel.size)]


def sum_in_order(parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Sums the parts, first to last, in ``out``, which is not a part, or in a new tensor."""
    if out is None:
        out = allocate_like(parts[0])
    if len(parts) == 1:
        return out.copy_(parts[0])
    total = torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        total += part
    return total
