"""Choice of the fastest collective by the latency-bandwidth model, and resolution of ``auto`` in a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from farflung.comm.collectives import COLLECTIVES, collective_named, usual_collective
from farflung.errors import ConfigError, Unsupported

if TYPE_CHECKING:
    from farflung.network import NetworkProfile

__all__ = ["SIDE_NBYTES", "choose", "cost_s", "resolve_collective"]

SIDE_NBYTES = 48
"""Bytes of a gradient's metadata: its weight, and reports of the replica."""


def cost_s(profile: NetworkProfile, collective: str, nbytes: int, *, side_nbytes: int = 0) -> float:
    """Predicts the duration of one exchange, in seconds.

    Args:
      profile: Network profile with its number of nodes.
      collective: Name in :data:`farflung.comm.COLLECTIVES`.
      nbytes: Bytes of one replica's tensor; for payloads that all replicas gather, predict ``all_gather``.
      metadata_nbytes: Bytes of the metadata.

    Raises:
      UnknownName: there is no such collective.
      Unsupported: its duration cannot be predicted.
      ConfigError: the profile's number of nodes is open.
    """
    formula = collective_named(collective).cost_s
    if formula is None:
        raise Unsupported(f"collective {collective!r} has no formula for its time: simulate it instead")
    if profile.nodes is None:
        raise ConfigError(f"{profile.name}: the number of nodes is not set; use for_nodes(count)")
    return 0.0 if profile.nodes == 1 else formula(profile, nbytes, side_nbytes)


def choose(
    profile: NetworkProfile, nbytes: int, *, among: Sequence[str] | None = None, side_nbytes: int = 0
) -> str:
    """Chooses the fastest collective for ``nbytes``; equal on all ranks that have the same profile.

    The first candidate wins unless another is faster by more than a billionth, so that rounding never decides.
    Default candidates are all collectives with a predictable duration.
    """
    if among is None:
        among = [name for name, collective in COLLECTIVES.items() if collective.cost_s is not None]
    fastest = among[0]
    fastest_s = cost_s(profile, fastest, nbytes, side_nbytes=side_nbytes)
    for candidate in among[1:]:
        candidate_s = cost_s(profile, candidate, nbytes, side_nbytes=side_nbytes)
        if candidate_s < fastest_s * (1 - 1e-9):
            fastest, fastest_s = candidate, candidate_s
    return fastest


def resolve_collective(nbytes: int, size: int, profile: NetworkProfile | None) -> str:
    """Resolves ``auto``: the fastest collective for one tensor among those that add in rank order.

    Parameters therefore never depend on the choice. ``all_gather`` is considered only if it sends little more
    than ``direct``: each rank adds the whole tensors of all ranks, which the model does not charge. Without a
    profile the result is :func:`farflung.comm.collectives.choose_default_collective`.

    Args:
      nbytes: Bytes of the tensor.
      size: Number of replicas.
      profile: Profile of the network, given or measured; None if it is unknown.

    Raises:
      ConfigError: the profile is of another number of nodes.
    """
    default = usual_collective(nbytes, size)
    if profile is None:
        return default
    candidates = [
        name
        for name, collective in COLLECTIVES.items()
        if collective.in_rank_order and collective.cost_s is not None and name not in (default, "all_gather")
    ]
    return choose(profile.for_nodes(size), nbytes, among=[default, *candidates], side_nbytes=SIDE_NBYTES)
