"""Which collective is the fastest, by the latency-bandwidth model; what ``auto`` stands for in a run."""

from __future__ import annotations

from collections.abc import Sequence

from farflung.comm.collectives import AUTO, COLLECTIVES, collective_named
from farflung.errors import ConfigError, Unsupported
from farflung.network import NetworkProfile

__all__ = ["SIDE_NBYTES", "choose", "cost_s", "resolve_collective"]

SIDE_NBYTES = 48
"""What rides beside a gradient: its weight, and what a replica tells the others."""
WORTH_A_DELAY_NBYTES = 1 << 16
"""How much more a rank may send to save one delay, our choice; where the network is not known nothing else counts."""


def cost_s(profile: NetworkProfile, collective: str, nbytes: int, *, side_nbytes: int = 0) -> float:
    """Seconds that one exchange takes.

    Args:
      profile: with its number of nodes.
      collective: a name in :data:`farflung.comm.COLLECTIVES`.
      nbytes: of one replica's tensor; what payloads take that all gather is what ``all_gather`` takes.
      side_nbytes: of the vector that rides along.

    Raises:
      UnknownName: no such collective.
      Unsupported: one whose time cannot be predicted.
      ConfigError: the profile's number of nodes is open.
    """
    formula = collective_named(collective).cost_s
    if formula is None:
        raise Unsupported(f"collective {collective!r} has no formula for its time: simulate it instead")
    if profile.nodes is None:
        raise ConfigError(f"{profile.name}: nodes: how many is open; use for_nodes(count)")
    return 0.0 if profile.nodes == 1 else formula(profile, nbytes, side_nbytes)


def choose(
    profile: NetworkProfile,
    nbytes: Sequence[int],
    *,
    among: Sequence[str] | None = None,
    side_nbytes: int = 0,
) -> str:
    """The collective that takes the least time for some tensors together; equal wherever the profile is.

    The first of ``among`` wins unless another is faster by more than a billionth: no choice hangs on how a machine
    rounds.

    Args:
      profile: with its number of nodes.
      nbytes: of one replica's tensors.
      among: names; when not given, all whose time can be predicted.
      side_nbytes: of the vector that rides along with each.
    """
    if among is None:
        among = [name for name, collective in COLLECTIVES.items() if collective.cost_s is not None]

    def seconds(name: str) -> float:
        return sum(cost_s(profile, name, each, side_nbytes=side_nbytes) for each in nbytes)

    best, least = among[0], seconds(among[0])
    for other in among[1:]:
        found = seconds(other)
        if found < least * (1 - 1e-9):
            best, least = other, found
    return best


def resolve_collective(name: str, nbytes: Sequence[int], size: int, profile: NetworkProfile | None) -> str:
    """The collective that ``name`` stands for: itself, and for ``auto`` the fastest that adds in rank order.

    So parameters never depend on the choice. It is one for the whole run: the sum of the closed-form times of a
    step's tensors decides. ``all_gather`` is asked about where it sends at most 64 KiB more than ``direct`` for each,
    always so between two, for every rank adds everybody's whole tensor; the model does not charge for that.
    Where the network is not known it is taken there, and ``direct`` elsewhere: no other takes fewer delays, and it
    sends no more than a ring. One choice for all buckets, and what a delay is worth, are ours.

    Args:
      name: in :data:`farflung.comm.COLLECTIVES`.
      nbytes: of the tensors summed in a step, from :func:`farflung.reducers.summed_nbytes`; where there are none, as
        with a codec inside every sum, it is ``direct``.
      size: number of replicas.
      profile: of the network, given or measured; ``None``: nothing is known of it.

    Raises:
      UnknownName: no such collective.
      ConfigError: the profile is of another number of nodes.
    """
    collective_named(name)
    if name != AUTO:
        return name
    if not nbytes:
        return "direct"
    more = (size - 1) * (size - 2) * sum(nbytes) // size
    usual = "all_gather" if more <= WORTH_A_DELAY_NBYTES * len(nbytes) else "direct"
    if profile is None:
        return usual
    candidates = [
        other
        for other, collective in COLLECTIVES.items()
        if collective.in_rank_order and collective.cost_s is not None and other not in (usual, "all_gather")
    ]
    return choose(profile.for_nodes(size), nbytes, among=[usual, *candidates], side_nbytes=SIDE_NBYTES)
