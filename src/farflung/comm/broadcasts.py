"""Broadcast trees, by which one rank's tensors reach all others and each rank sends them about once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from farflung.comm.collectives.auto import MAX_EXTRA_NBYTES

if TYPE_CHECKING:
    from farflung.network import NetworkProfile

__all__ = ["BroadcastTree", "choose_trees"]

BroadcastTree: TypeAlias = Mapping[int, int]
"""Parent from which each rank except the source receives; parents come before their children."""


def choose_trees(size: int, src: int, nbytes: int, profile: NetworkProfile | None) -> list[BroadcastTree]:
    """Chooses the trees of a broadcast, each of which carries an equal part of it; equal on all ranks.

    A *star* takes one delay, and is chosen if the source sends at most 64 KiB more by it. *Fans* take two: each
    other rank receives a part and sends it to the rest. A *chain* passes everything from rank to rank, so only
    once between two sites. It is chosen if a profile predicts that it is faster than fans.

    Args:
      size: Number of ranks.
      src: Rank of the source.
      nbytes: Bytes of all tensors.
      profile: Profile of the network, equal on all ranks; None if it is unknown.

    Raises:
      ConfigError: the profile is of another number of nodes.
    """
    ranks = [(src + offset) % size for offset in range(1, size)]
    if (size - 2) * nbytes <= MAX_EXTRA_NBYTES:
        return [dict.fromkeys(ranks, src)]
    fans: list[BroadcastTree] = [
        {owner: src, **{rank: owner for rank in ranks if rank != owner}} for owner in ranks
    ]
    if profile is None:
        return fans
    from farflung.network.costs import predict_broadcast_s

    chain: list[BroadcastTree] = [dict(zip(ranks, [src, *ranks], strict=False))]
    nodes = profile.with_nodes(size)
    is_faster = predict_broadcast_s(nodes, chain, nbytes) < predict_broadcast_s(nodes, fans, nbytes) * (
        1 - 1e-9
    )
    return chain if is_faster else fans
