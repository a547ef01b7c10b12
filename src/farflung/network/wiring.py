"""Wiring: the capacities that flows between nodes share, for single flows and for a collective's flows in bundles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from farflung.network.link import BandwidthTrace, Capacity, compute_mean_capacity
from farflung.network.profile import NetworkProfile
from farflung.network.tcp import CongestionControl

__all__ = [
    "FlowBundle",
    "NetworkPath",
    "NodeGroup",
    "Resource",
    "ResourceUse",
    "Wiring",
    "build_mesh",
    "compute_loads_s",
    "group_nodes",
]


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """Use of one resource by a flow: ``times`` its rate."""

    resource: int
    times: int = 1


@dataclass(frozen=True, slots=True)
class NetworkPath:
    """Path of a message from one node to another.

    Args:
      latency_s: One-way delay.
      jitter_s: Bound of its deviation.
      uses: Uses of shared resources.
      congestion: Congestion control of its connection, which then has to find its rate; None if it need not.
      round_trip_s: Sum of both delays, for the congestion control.
      loss: Share of packets that are lost.
      num_connections: Number of connections that share a message equally, each with these ``uses``.
    """

    latency_s: float
    jitter_s: float
    uses: tuple[ResourceUse, ...]
    congestion: CongestionControl | None = None
    round_trip_s: float = 0.0
    loss: float = 0.0
    num_connections: int = 1


class Wiring:
    """Numbering of a profile's resources, and their uses by each pair of nodes.

    Args:
      profile: Profile with its number of nodes.
      apply_loss: True to reduce a link's bandwidth by its loss.
    """

    def __init__(self, profile: NetworkProfile, *, apply_loss: bool = True) -> None:
        self.profile, self._applies_loss = profile, apply_loss
        self.capacities: list[Capacity] = []
        """Capacity of each resource; grows as paths are requested."""
        self._numbers: dict[Resource, int] = {}
        self._paths: dict[tuple[int, int], NetworkPath] = {}

    def get_path(self, src: int, dst: int) -> NetworkPath:
        """Returns the path from ``src`` to ``dst``."""
        path = self._paths.get((src, dst))
        if path is None:
            path = self._paths[src, dst] = self._build_path(src, dst)
        return path

    def _build_path(self, src: int, dst: int) -> NetworkPath:
        profile = self.profile
        a, b = profile.get_site_index(src), profile.get_site_index(dst)
        site_link = profile.get_site_link(a, b)
        uses = []
        for key, capacity, times in iter_flow_limits(profile, a, b, src, dst, apply_loss=self._applies_loss):
            if key not in self._numbers:
                self._numbers[key] = len(self.capacities)
                self.capacities.append(capacity)
            uses.append(ResourceUse(self._numbers[key], times))
        return NetworkPath(
            site_link.link.latency_s,
            site_link.link.jitter_s,
            tuple(uses),
            profile.congestion,
            profile.get_round_trip_s(a, b),
            site_link.link.loss,
            profile.count_connections(a, b),
        )


Resource: TypeAlias = tuple[str, int, int]
"""Kind of a capacity and its owner; one may stand for every node of a group, or for every pair of nodes."""


def iter_flow_limits(
    profile: NetworkProfile, src_site: int, dst_site: int, src: int, dst: int, *, apply_loss: bool = True
) -> Iterator[tuple[Resource, Capacity, int]]:
    """Yields the limits of a flow between two nodes, or nodes of two groups, with the number of crossings."""
    site_link = profile.get_site_link(src_site, dst_site)
    link = ("link", src_site, dst_site) if site_link.shared else ("pair", src, dst)
    speed = profile.compute_goodput_bps(src_site, dst_site) if apply_loss else site_link.link.bandwidth_bps
    ends = {"up": src, "down": dst}
    candidates = [
        (link, speed, 1),
        *(
            ((kind, ends.get(kind, place), 0), capacity, times)
            for (kind, place), capacity, times in profile.iter_limits(src_site, dst_site)
        ),
    ]
    yield from (item for item in candidates if isinstance(item[1], BandwidthTrace) or item[1] < math.inf)


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Consecutive nodes of one site with equal roles in a collective.

    Args:
      site: Index of the site.
      first: First node.
      count: Number of nodes.
      is_owner: True if they own a shard.
    """

    site: int
    first: int
    count: int
    is_owner: bool = False


@dataclass(frozen=True, slots=True)
class FlowBundle:
    """Flows from each node of a group to each node of another, or to each other node of its own.

    Args:
      src: Number of the sending group.
      dst: Number of the receiving group.
      per_src: Flows that leave each sender.
      per_dst: Flows that reach each receiver.
    """

    src: int
    dst: int
    per_src: int
    per_dst: int


def group_nodes(profile: NetworkProfile, num_owners: int) -> list[NodeGroup]:
    """Groups the nodes of a profile by site, the first ``num_owners`` of all apart from the others.

    Args:
      profile: Profile with its number of nodes.
      num_owners: Number of nodes that own a shard.
    """
    first_nodes = {profile.get_site_nodes(site).start for site in range(len(profile.sites))} | {num_owners}
    bounds = [*sorted(start for start in first_nodes if 0 <= start < profile.node_count), profile.node_count]
    return [
        NodeGroup(profile.get_site_index(first), first, end - first, first < num_owners)
        for first, end in pairwise(bounds)
    ]


def build_mesh(
    groups: Sequence[NodeGroup], *, to_owners: bool = False, from_owners: bool = False
) -> list[FlowBundle]:
    """Builds the flows between every two nodes; optionally only those to owners, or from owners."""
    bundles = []
    for src, src_group in enumerate(groups):
        for dst, dst_group in enumerate(groups):
            if (to_owners and not dst_group.is_owner) or (from_owners and not src_group.is_owner):
                continue
            is_same = src == dst
            if dst_group.count > is_same:
                bundles.append(FlowBundle(src, dst, dst_group.count - is_same, src_group.count - is_same))
    return bundles


def collect_limits(
    profile: NetworkProfile, groups: Sequence[NodeGroup], bundle: FlowBundle
) -> dict[Resource, tuple[Capacity, int]]:
    """Collects the limits of a bundle: each capacity, and the number of its uses by the bundle's flows."""
    src, dst = groups[bundle.src], groups[bundle.dst]
    num_flows = {"pair": 1, "up": bundle.per_src, "down": bundle.per_dst}
    return {
        resource: (capacity, times * num_flows.get(resource[0], src.count * bundle.per_src))
        for resource, capacity, times in iter_flow_limits(profile, src.site, dst.site, bundle.src, bundle.dst)
    }


def compute_loads_s(
    profile: NetworkProfile, groups: Sequence[NodeGroup], bundles: Sequence[FlowBundle], nbytes: float
) -> dict[Resource, float]:
    """Computes the seconds that each capacity needs for ``nbytes`` in every flow; a trace counts by its mean."""
    loads: dict[Resource, float] = {}
    for bundle in bundles:
        for resource, (capacity, count) in collect_limits(profile, groups, bundle).items():
            seconds = 8 * nbytes * count / compute_mean_capacity(capacity)
            loads[resource] = loads.get(resource, 0.0) + seconds
    return loads
