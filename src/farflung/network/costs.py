r"""Cost model of collectives: durations by the latency-bandwidth model.

The formulas assume that all ranks begin together and the network is otherwise idle. On equal links that are not
shared they are exact. Elsewhere they predict the load of the busiest capacity, and leave shares over time to
the simulator. Latencies and traces count by their mean.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from farflung.network.profile import NetworkProfile
    from farflung.network.wiring import FlowBundle, NodeGroup

__all__ = [
    "Cost",
    "count_pieces",
    "predict_all_gather_s",
    "predict_broadcast_s",
    "predict_ring_s",
    "predict_sharded_s",
]

Cost: TypeAlias = "Callable[[NetworkProfile, int, int], float]"
"""Seconds, from a profile with its number of nodes, the bytes of the tensor and those of the metadata."""

MIN_PIECE_NBYTES, MAX_PIECE_NBYTES = 500_000, 1 << 24
"""Size from which pieces are two, so that a link does not rest between the halves of an all-reduce; and from which they
are more, since each takes memory at its receivers."""
MAX_PIECES = 8


def count_pieces(nbytes: int) -> int:
    """Counts the pieces into which collectives cut ``nbytes``; each is a message, which takes processor time."""
    return min(MAX_PIECES, max(1, min(2, nbytes // MIN_PIECE_NBYTES), nbytes // MAX_PIECE_NBYTES))


def predict_ring_s(profile: NetworkProfile, nbytes: int, metadata_nbytes: int) -> float:
    r"""Predicts a ring of ``2 (N - 1)`` hops; rank :math:`r` takes :math:`d_r = \alpha_r + \beta_r n / N` for each.

    .. math:: \max\Big( \max_r \sum_{j=1}^{2(N-1)} d_{r-j},\ \max_r \big(2 (N-1) \beta_r n / N + \alpha_r\big) \Big)

    A segment adds up the delays of the links it passes, and a slow link makes all segments queue. On equal links this
    is :math:`2 (N-1)\, d`.
    """
    size = profile.node_count
    alpha, seconds_per_bit = _compute_ring_links(profile)
    transfer_s = seconds_per_bit * 8 * (nbytes / size)
    delays = alpha + transfer_s
    hops = 2 * (size - 1)
    cycle_s = 2 * float(delays.sum()) - float((delays + np.roll(delays, 1)).min())
    metadata_s = 8 * metadata_nbytes * hops * float(seconds_per_bit.mean())
    return max(cycle_s + metadata_s, float((hops * transfer_s + alpha).max()))


def _compute_ring_links(profile: NetworkProfile) -> tuple[np.ndarray, np.ndarray]:
    """Computes latency and seconds per bit from each rank to the next, while all hops send at once."""
    from farflung.network.link import compute_mean_capacity
    from farflung.network.wiring import Wiring

    wiring, size = Wiring(profile), profile.node_count
    paths = [wiring.get_path(rank, (rank + 1) % size) for rank in range(size)]
    loads = Counter[int]()
    for path in paths:
        loads.update({use.resource: use.times for use in path.uses})
    shares = [
        compute_mean_capacity(capacity) / loads[number] for number, capacity in enumerate(wiring.capacities)
    ]
    slowest = [min((shares[use.resource] for use in path.uses), default=math.inf) for path in paths]
    return np.array([path.latency_s for path in paths]), 1 / np.array(slowest)


def predict_sharded_s(
    count_owners: Callable[[int], int], profile: NetworkProfile, nbytes: int, metadata_nbytes: int
) -> float:
    r"""Predicts an all-reduce by owners: to the owners of the shards and back, in :math:`P` pieces.

    .. math:: \alpha_2 + T_1 + T_2 \quad (P = 1), \qquad
        \max\big( \alpha_2 + T_1 + T_2 / P,\ \alpha_2 + T_1 / P + T_2,\ \alpha + T_{12} \big)

    :math:`T_1, T_2` are the busiest capacity's seconds to the owners and back, :math:`T_{12}` those for both. The
    longest delay to an owner and on to another rank is :math:`\alpha_2`, the longest single one :math:`\alpha`.
    """
    from farflung.network.wiring import build_mesh, compute_loads_s, group_nodes

    size = profile.node_count
    owners = count_owners(size)
    groups = group_nodes(profile, owners)
    shard = nbytes / owners
    pieces = count_pieces(int(shard))
    gathering, spreading = build_mesh(groups, to_owners=True), build_mesh(groups, from_owners=True)
    metadata_back = metadata_nbytes if owners < size else 0
    first = compute_loads_s(profile, groups, gathering, shard + metadata_nbytes)
    second = compute_loads_s(profile, groups, spreading, shard + metadata_back)
    t1, t2 = max(first.values(), default=0.0), max(second.values(), default=0.0)
    one_way_s, two_way_s = _compute_latencies(profile, groups, gathering, spreading)
    if pieces == 1:
        return two_way_s + t1 + t2
    both_s = max((first.get(r, 0.0) + second.get(r, 0.0) for r in first.keys() | second.keys()), default=0.0)
    return max(two_way_s + t1 + t2 / pieces, two_way_s + t1 / pieces + t2, one_way_s + both_s)


def _compute_latencies(
    profile: NetworkProfile,
    groups: Sequence[NodeGroup],
    gathering: Sequence[FlowBundle],
    spreading: Sequence[FlowBundle],
) -> tuple[float, float]:
    """Computes the longest latency of the spreading flows, and of gathering plus spreading at one owner, in seconds."""

    def get_latency_s(bundle: FlowBundle) -> float:
        return profile.get_site_link(groups[bundle.src].site, groups[bundle.dst].site).link.latency_s

    incoming: dict[int, float] = {}
    outgoing: dict[int, float] = {}
    for bundle in gathering:
        incoming[bundle.dst] = max(incoming.get(bundle.dst, 0.0), get_latency_s(bundle))
    for bundle in spreading:
        outgoing[bundle.src] = max(outgoing.get(bundle.src, 0.0), get_latency_s(bundle))
    return max(outgoing.values()), max(
        incoming.get(owner, 0.0) + outgoing.get(owner, 0.0) for owner in incoming.keys() | outgoing.keys()
    )


def predict_all_gather_s(profile: NetworkProfile, nbytes: int, metadata_nbytes: int) -> float:
    """Predicts an all-gather, in seconds: the longest one-way delay plus the transfer time of the busiest capacity."""
    from farflung.network.wiring import build_mesh, compute_loads_s, group_nodes

    groups = group_nodes(profile, profile.node_count)
    bundles = build_mesh(groups)
    longest, _ = _compute_latencies(profile, groups, bundles, bundles)
    return longest + max(
        compute_loads_s(profile, groups, bundles, nbytes + metadata_nbytes).values(), default=0.0
    )


def predict_broadcast_s(profile: NetworkProfile, trees: Sequence[Mapping[int, int]], nbytes: int) -> float:
    """Predicts a broadcast in small pieces, in seconds: the longest path plus the busiest capacity's transfer time.

    Args:
      profile: Profile with its number of nodes.
      trees: Parent of each node except the source, parents first; each tree carries an equal part.
      nbytes: Bytes of all tensors.
    """
    from farflung.network.link import compute_mean_capacity
    from farflung.network.wiring import Wiring

    wiring = Wiring(profile)
    loads: Counter[int] = Counter()
    delays = [0.0]
    for tree in trees:
        delay: dict[int, float] = {}
        for node, parent in tree.items():
            path = wiring.get_path(parent, node)
            delay[node] = delay.get(parent, 0.0) + path.latency_s
            for use in path.uses:
                loads[use.resource] += use.times
        delays += delay.values()
    bits = 8 * nbytes / len(trees)
    busiest = (
        bits * times / compute_mean_capacity(wiring.capacities[resource]) for resource, times in loads.items()
    )
    return max(delays) + max(busiest, default=0.0)
