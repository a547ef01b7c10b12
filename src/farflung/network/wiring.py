"""The capacities that flows between nodes share: those of one flow, and those of a collective's flows in bundles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from farflung.network.link import Capacity, Trace, mean_capacity
from farflung.network.profile import Medium, NetworkProfile
from farflung.network.tcp import CongestionControl

__all__ = [
    "Bundle",
    "Group",
    "Path",
    "Resource",
    "Use",
    "Wiring",
    "groups_of",
    "loads_s",
    "mesh",
]


@dataclass(frozen=True, slots=True)
class Use:
    """A flow's use of one resource: ``times`` its rate."""

    resource: int
    times: int = 1


@dataclass(frozen=True, slots=True)
class Path:
    """What a message from one node to another meets.

    Args:
      latency_s: one way.
      jitter_s: of it, plus or minus.
      uses: of the resources it shares.
      congestion: the congestion control of its connection, which then has to find its rate; ``None``: it has not.
      round_trip_s: both delays, for that.
      loss: share of packets that are lost.
      connections: how many alike carry a message together, each an equal part and each with these ``uses``.
    """

    latency_s: float
    jitter_s: float
    uses: tuple[Use, ...]
    congestion: CongestionControl | None = None
    round_trip_s: float = 0.0
    loss: float = 0.0
    connections: int = 1


class Wiring:
    """Numbers the resources of a profile, and says which of them a pair's flow uses.

    Args:
      profile: with its number of nodes.
    """

    def __init__(self, profile: NetworkProfile) -> None:
        assert profile.nodes is not None
        self.profile = profile
        self.capacities: list[Capacity] = []
        """Of each resource; grows as paths are asked for."""
        self._numbers: dict[tuple[str, int, int], int] = {}
        self._paths: dict[tuple[int, int], Path] = {}
        self._media = {medium.name: (index, medium) for index, medium in enumerate(profile.media)}

    def path(self, src: int, dst: int) -> Path:
        """The way from ``src`` to ``dst``."""
        known = self._paths.get((src, dst))
        if known is None:
            known = self._paths[src, dst] = self._laid(src, dst)
        return known

    def _laid(self, src: int, dst: int) -> Path:
        profile = self.profile
        a, b = profile.site_index(src), profile.site_index(dst)
        there = profile.connection(a, b)
        goodput = profile.goodput_bps(a, b)
        wanted: list[tuple[tuple[str, int, int], Capacity, int]] = [
            (("link", a, b) if there.shared else ("pair", src, dst), goodput, 1),
            (("up", src, 0), profile.sites[a].up_bps, 1),
            (("down", dst, 0), profile.sites[b].down_bps, 1),
        ]
        if a != b:
            wanted.append((("exit", a, 0), profile.sites[a].exit_bps, 1))
            wanted.append((("entry", b, 0), profile.sites[b].entry_bps, 1))
        for index, medium, times in crossings(profile, self._media, a, b):
            wanted.append((("medium", index, 0), medium.bandwidth_bps, times))
        uses = []
        for key, capacity, times in wanted:
            number = self._number(key, capacity)
            if number is not None:
                uses.append(Use(number, times))
        return Path(
            there.link.latency_s,
            there.link.jitter_s,
            tuple(uses),
            profile.congestion,
            profile.round_trip_s(a, b),
            there.link.loss,
            profile.connections_of(a, b),
        )

    def _number(self, key: tuple[str, int, int], capacity: Capacity) -> int | None:
        if not isinstance(capacity, Trace) and capacity == math.inf:
            return None
        if key not in self._numbers:
            self._numbers[key] = len(self.capacities)
            self.capacities.append(capacity)
        return self._numbers[key]


def crossings(
    profile: NetworkProfile, media: dict[str, tuple[int, Medium]], src_site: int, dst_site: int
) -> list[tuple[int, Medium, int]]:
    """The media that a flow between two sites crosses, and how often."""
    found: list[tuple[int, Medium, int]] = []
    one, other = profile.sites[src_site].medium, profile.sites[dst_site].medium
    if one is not None:
        index, medium = media[one]
        found.append((index, medium, 2 if one == other and medium.relayed else 1))
    if other is not None and other != one:
        index, medium = media[other]
        found.append((index, medium, 1))
    return found


Resource: TypeAlias = tuple[str, int, int]
"""A kind of capacity, and whose: one stands for that of every node of a group, or of every pair of nodes."""


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes of one site that take the same part in a collective, and follow each other.

    Args:
      site: of the profile's sites.
      first: the first of them.
      count: how many.
      owns: whether they own a shard.
    """

    site: int
    first: int
    count: int
    owns: bool = False


@dataclass(frozen=True, slots=True)
class Bundle:
    """One flow from each node of a group to each of another, or to each other of its own.

    Args:
      src: number of the group that sends.
      dst: number of the group that receives.
      per_src: flows that leave each sender.
      per_dst: flows that reach each receiver.
    """

    src: int
    dst: int
    per_src: int
    per_dst: int


def groups_of(profile: NetworkProfile, owners: int) -> list[Group]:
    """The nodes of a profile by site, the first ``owners`` of all apart from the others.

    Args:
      profile: with its number of nodes.
      owners: how many own a shard.
    """
    starts = {profile.span(site).start for site in range(len(profile.sites))} | {owners}
    bounds = [*sorted(start for start in starts if 0 <= start < _nodes(profile)), _nodes(profile)]
    return [
        Group(profile.site_index(first), first, end - first, first < owners)
        for first, end in pairwise(bounds)
    ]


def mesh(groups: Sequence[Group], *, to_owners: bool = False, from_owners: bool = False) -> list[Bundle]:
    """A flow between every two nodes; only to owners, or only from them, where that is said."""
    bundles = []
    for src, one in enumerate(groups):
        for dst, other in enumerate(groups):
            if (to_owners and not other.owns) or (from_owners and not one.owns):
                continue
            same = src == dst
            if other.count > same:
                bundles.append(Bundle(src, dst, other.count - same, one.count - same))
    return bundles


def used_by(
    profile: NetworkProfile, groups: Sequence[Group], bundle: Bundle
) -> dict[Resource, tuple[Capacity, int]]:
    """What limits a bundle: each capacity, and how many of the bundle's flows use one of its kind."""
    one, other = groups[bundle.src], groups[bundle.dst]
    a, b = one.site, other.site
    total = one.count * bundle.per_src
    way = profile.connection(a, b)
    key = ("link", a, b) if way.shared else ("pair", bundle.src, bundle.dst)
    uses: dict[Resource, tuple[Capacity, int]] = {
        key: (profile.goodput_bps(a, b), total if way.shared else 1),
        ("up", bundle.src, 0): (profile.sites[a].up_bps, bundle.per_src),
        ("down", bundle.dst, 0): (profile.sites[b].down_bps, bundle.per_dst),
    }
    if a != b:
        uses["exit", a, 0] = profile.sites[a].exit_bps, total
        uses["entry", b, 0] = profile.sites[b].entry_bps, total
    media = {medium.name: (index, medium) for index, medium in enumerate(profile.media)}
    for index, medium, times in crossings(profile, media, a, b):
        uses["medium", index, 0] = medium.bandwidth_bps, total * times
    return {
        resource: (capacity, count)
        for resource, (capacity, count) in uses.items()
        if isinstance(capacity, Trace) or capacity < math.inf
    }


def loads_s(
    profile: NetworkProfile, groups: Sequence[Group], bundles: Sequence[Bundle], nbytes: float
) -> dict[Resource, float]:
    """How many seconds each capacity needs for ``nbytes`` in every flow; a trace counts by its mean."""
    loads: dict[Resource, float] = {}
    for bundle in bundles:
        for resource, (capacity, count) in used_by(profile, groups, bundle).items():
            seconds = 8 * nbytes * count / mean_capacity(capacity)
            loads[resource] = loads.get(resource, 0.0) + seconds
    return loads


def _nodes(profile: NetworkProfile) -> int:
    assert profile.nodes is not None
    return profile.nodes
