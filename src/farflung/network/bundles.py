"""The flows of a whole collective in bundles of flows that are alike, and what they load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from farflung.network.profile import NetworkProfile
from farflung.network.trace import Capacity, Trace, mean_capacity
from farflung.network.wiring import crossings

__all__ = ["Bundle", "Group", "Resource", "groups_of", "loads_s", "mesh", "used_by"]

Resource: TypeAlias = tuple[str, int, int]
"""A kind of capacity, and whose: one stands for that of every node of a group, or of every pair of nodes."""


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes of one site that take the same part in a collective."""

    site: int
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
    """The nodes of a profile by site, the first ``owners`` of all apart from the others."""
    groups = []
    for site in range(len(profile.sites)):
        span = profile.span(site)
        owning = min(max(0, owners - span.start), len(span))
        for count, owns in ((owning, True), (len(span) - owning, False)):
            if count:
                groups.append(Group(site, count, owns))
    return groups


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
