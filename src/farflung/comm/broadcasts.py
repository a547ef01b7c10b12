"""Trees down which one rank's tensors go to all others, so that none sends them more than about once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from farflung.comm.collectives.auto import WORTH_A_DELAY_NBYTES

if TYPE_CHECKING:
    from farflung.network import NetworkProfile

__all__ = ["Tree", "choose_trees"]

Tree: TypeAlias = Mapping[int, int]
"""The rank from which each rank but the source receives; a parent comes before its children."""


def choose_trees(size: int, src: int, nbytes: int, profile: NetworkProfile | None) -> list[Tree]:
    """Returns the trees of a broadcast, each of which carries an equal part of it; equal on all ranks.

    A *star* takes one delay, and is chosen where the source sends at most 64 KiB more by it. *Fans* take two: each
    other rank is given a part and hands it to the rest. A *chain* passes all from rank to rank, and so between two
    sites once. It is chosen where a profile says that it is faster than fans.

    Args:
      size: number of ranks.
      src: the rank that has the tensors.
      nbytes: of all tensors.
      profile: of the network, alike on all ranks; ``None``: it is not known.

    Raises:
      ConfigError: the profile is of another number of nodes.
    """
    others = [(src + offset) % size for offset in range(1, size)]
    if (size - 2) * nbytes <= WORTH_A_DELAY_NBYTES:
        return [dict.fromkeys(others, src)]
    fans: list[Tree] = [{owner: src, **{rank: owner for rank in others if rank != owner}} for owner in others]
    if profile is None:
        return fans
    from farflung.network.costs import broadcast_s

    chain: list[Tree] = [dict(zip(others, [src, *others], strict=False))]
    nodes = profile.for_nodes(size)
    is_faster = broadcast_s(nodes, chain, nbytes) < broadcast_s(nodes, fans, nbytes) * (1 - 1e-9)
    return chain if is_faster else fans
