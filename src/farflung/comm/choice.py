"""Choice of the fastest collective by the latency-bandwidth model, and resolution of ``auto`` in a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from farflung.comm.collectives import COLLECTIVES, choose_default_collective, find_collective
from farflung.errors import ConfigError, Unsupported

if TYPE_CHECKING:
    from farflung.network import NetworkProfile

__all__ = ["METADATA_NBYTES", "choose_collective", "predict_cost_s", "resolve_collective"]

METADATA_NBYTES = 48
"""Bytes of a gradient's metadata: its weight, and reports of the replica."""
MIN_DIRECT_NBYTES = 1_000_000
"""Bytes from which half as many copies and additions are worth more than a message less."""
SERVERS = frozenset({"multi_parameter_server", "parameter_server"})
"""Collectives whose messages share the links of a few ranks."""


def predict_cost_s(
    profile: NetworkProfile, collective: str, nbytes: int, *, metadata_nbytes: int = 0
) -> float:
    """Predicts the duration of one exchange, in seconds.

    Args:
      profile: Network profile with its number of nodes.
      collective: Name in :data:`farflung.comm.COLLECTIVES`.
      nbytes: Bytes of one replica's tensor; for payloads that all replicas gather, predict
      ``all_gather``.
      metadata_nbytes: Bytes of the metadata.

    Raises:
      UnknownName: there is no such collective.
      Unsupported: its duration cannot be predicted.
      ConfigError: the profile's number of nodes is open.
    """
    formula = find_collective(collective).cost_s
    if formula is None:
        raise Unsupported(f"collective {collective!r} has no formula for its time: simulate it instead")
    if profile.nodes is None:
        raise ConfigError(f"{profile.name}: the number of nodes is not set; use for_nodes(count)")
    return 0.0 if profile.nodes == 1 else formula(profile, nbytes, metadata_nbytes)


def choose_collective(
    profile: NetworkProfile, nbytes: int, *, candidates: Sequence[str] | None = None, metadata_nbytes: int = 0
) -> str:
    """Chooses the fastest collective for ``nbytes``; equal on all ranks that have the same profile.

    The first candidate wins unless another is faster by more than a billionth, so that rounding never decides.
    Default candidates are all collectives with a predictable duration.
    """
    if candidates is None:
        candidates = [name for name, collective in COLLECTIVES.items() if collective.cost_s is not None]
    fastest = candidates[0]
    fastest_s = predict_cost_s(profile, fastest, nbytes, metadata_nbytes=metadata_nbytes)
    for candidate in candidates[1:]:
        candidate_s = predict_cost_s(profile, candidate, nbytes, metadata_nbytes=metadata_nbytes)
        if candidate_s < fastest_s * (1 - 1e-9):
            fastest, fastest_s = candidate, candidate_s
    return fastest


def resolve_collective(
    nbytes: int, size: int, profile: NetworkProfile | None, *, is_measured: bool = False
) -> str:
    """Resolves ``auto``: the fastest collective for one tensor among those that add in rank order.

    Parameters therefore never depend on the choice. ``all_gather`` is considered only if it sends little
    more than ``direct``: each rank adds the whole tensors of all ranks, which the model does not charge. So between
    two replicas, where both send equally many bytes, ``direct`` is preferred from :data:`MIN_DIRECT_NBYTES` on if the
    network has no delay. Without a profile the result is
    :func:`farflung.comm.collectives.choose_default_collective`.

    Args:
      nbytes: Bytes of the tensor.
      size: Number of replicas.
      profile: Profile of the network, given or measured; None if it is unknown.
      is_measured: True to leave out parameter servers: rates of links that were measured at once do not tell what a
        server's links share.

    Raises:
      ConfigError: the profile is of another number of nodes.
    """
    default = choose_default_collective(nbytes, size)
    if profile is None:
        return default
    candidates = [
        name
        for name, collective in COLLECTIVES.items()
        if collective.is_rank_ordered
        and collective.cost_s is not None
        and name not in (default, "all_gather")
        and not (is_measured and name in SERVERS)
    ]
    candidates.insert(
        candidates.index("direct") + 1 if size == 2 and nbytes >= MIN_DIRECT_NBYTES else 0, default
    )
    return choose_collective(
        profile.with_nodes(size), nbytes, candidates=candidates, metadata_nbytes=METADATA_NBYTES
    )
