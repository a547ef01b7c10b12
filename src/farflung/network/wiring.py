"""Which capacities a flow between two nodes uses up."""

from __future__ import annotations

import math
from dataclasses import dataclass

from farflung.network.profile import Medium, NetworkProfile
from farflung.network.tcp import CongestionControl
from farflung.network.trace import Capacity, Trace

__all__ = ["Path", "Use", "Wiring"]


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
    """

    latency_s: float
    jitter_s: float
    uses: tuple[Use, ...]
    congestion: CongestionControl | None = None
    round_trip_s: float = 0.0
    loss: float = 0.0


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
        self._numbers: dict[tuple[str, int, int], int | None] = {}
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
        )

    def _number(self, key: tuple[str, int, int], capacity: Capacity) -> int | None:
        if key not in self._numbers:
            limited = isinstance(capacity, Trace) or capacity < math.inf
            self._numbers[key] = len(self.capacities) if limited else None
            if limited:
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


def is_dedicated(profile: NetworkProfile) -> bool:
    """Whether every ordered pair has a link of its own that nothing else limits and that is the same at all times."""
    if profile.media or any(way.shared for way in profile.connections):
        return False
    limits = (limit for s in profile.sites for limit in (s.up_bps, s.down_bps, s.exit_bps, s.entry_bps))
    if any(isinstance(limit, Trace) or limit < math.inf for limit in limits):
        return False
    return not any(isinstance(link.bandwidth_bps, Trace) for link in profile.all_links())
