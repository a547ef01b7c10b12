r"""What collectives take, by the latency-bandwidth model, and which of them is fastest.

The formulas assume that all ranks begin together and nothing else is on the way. On links that are alike and not
shared they are exact; elsewhere they say what the busiest capacity needs, and shares over time are left to the
simulator. Latencies count by their mean, traces by theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from farflung.errors import ConfigError, UnknownName
from farflung.network.bundles import Bundle, Group, groups_of, loads_s, mesh
from farflung.network.profile import NetworkProfile
from farflung.network.trace import mean_capacity

__all__ = ["COSTS", "choose", "cost_s", "pieces_of"]

PIECE_NBYTES = 1 << 20
"""What a rank sends another is cut into pieces of about this size, so that what comes after a piece's arrival starts
before the last has come."""
MAX_PIECES = 8


def pieces_of(nbytes: int) -> int:
    """Into how many pieces collectives cut ``nbytes``."""
    return min(MAX_PIECES, max(1, nbytes // PIECE_NBYTES))


def cost_s(profile: NetworkProfile, collective: str, nbytes: int, *, side_nbytes: int = 0) -> float:
    """Seconds that one exchange takes.

    Args:
      profile: with its number of nodes.
      collective: a name in :data:`COSTS`.
      nbytes: of one replica's tensor; what payloads take that all gather is what ``all_gather`` takes.
      side_nbytes: of the vector that rides along.

    Raises:
      UnknownName: no such collective.
      ConfigError: the profile's number of nodes is open.
    """
    if collective not in COSTS:
        raise UnknownName("collective", collective, COSTS)
    if profile.nodes is None:
        raise ConfigError(f"{profile.name}: nodes: how many is open; use for_nodes(count)")
    return 0.0 if profile.nodes == 1 else COSTS[collective](profile, nbytes, side_nbytes)


def choose(
    profile: NetworkProfile,
    nbytes: int,
    *,
    among: Sequence[str] = ("direct", "all_gather", "ring", "multi_parameter_server", "parameter_server"),
    side_nbytes: int = 0,
) -> str:
    """The collective that is fastest for ``nbytes``; equal on all ranks that have the same profile.

    The first of ``among`` wins unless another is faster by more than a billionth: no choice hangs on how a machine
    rounds.
    """
    best = among[0]
    seconds = cost_s(profile, best, nbytes, side_nbytes=side_nbytes)
    for other in among[1:]:
        found = cost_s(profile, other, nbytes, side_nbytes=side_nbytes)
        if found < seconds * (1 - 1e-9):
            best, seconds = other, found
    return best


def _ring(profile: NetworkProfile, nbytes: int, side_nbytes: int) -> float:
    r"""Twice ``N - 1`` hops, each rank to the next; with :math:`d_r = \alpha_r + \beta_r n / N` from rank :math:`r`.

    .. math:: \max\Big( \max_r \sum_{j=1}^{2(N-1)} d_{r-j},\ \max_r \big(2 (N-1) \beta_r n / N + \alpha_r\big) \Big)

    A segment adds up the delays of the links it passes, and a slow link makes all segments wait in line. On links
    that are alike this is :math:`2 (N-1)\, d`.
    """
    size = _size(profile)
    alpha, seconds_per_bit = _ring_links(profile)
    each = seconds_per_bit * 8 * (nbytes / size)
    delays = alpha + each
    hops = 2 * (size - 1)
    around = 2 * float(delays.sum()) - float((delays + np.roll(delays, 1)).min())
    riding = 8 * side_nbytes * hops * float(seconds_per_bit.mean())
    return max(around + riding, float((hops * each + alpha).max()))


def _ring_links(profile: NetworkProfile) -> tuple[np.ndarray, np.ndarray]:
    """Latency, and seconds for each bit, from every rank to the next."""
    sites = [np.repeat(index, len(profile.span(index))) for index in range(len(profile.sites))]
    here = np.concatenate(sites)
    following = np.roll(here, -1)
    ways = sorted({(int(a), int(b)) for a, b in zip(here, following, strict=True)})
    leaving = {a: int(((here == a) & (following != a)).sum()) for a, _ in ways}
    entering = {b: int(((here != b) & (following == b)).sum()) for _, b in ways}
    on_medium: dict[str, int] = {}
    for a, b in ways:
        times = int(((here == a) & (following == b)).sum())
        for name, crossed in _media(profile, a, b):
            on_medium[name] = on_medium.get(name, 0) + times * crossed
    bandwidths = {medium.name: mean_capacity(medium.bandwidth_bps) for medium in profile.media}
    alpha, seconds = np.zeros(len(here)), np.zeros(len(here))
    for a, b in ways:
        mask = (here == a) & (following == b)
        way = profile.connection(a, b)
        one, other = profile.sites[a], profile.sites[b]
        goodput = mean_capacity(profile.goodput_bps(a, b))
        limits = [
            goodput / int(mask.sum()) if way.shared else goodput,
            mean_capacity(one.up_bps),
            mean_capacity(other.down_bps),
        ]
        if a != b:
            limits += [mean_capacity(one.exit_bps) / leaving[a], mean_capacity(other.entry_bps) / entering[b]]
        limits += [bandwidths[name] / on_medium[name] for name, _ in _media(profile, a, b)]
        alpha[mask], seconds[mask] = way.link.latency_s, 1 / min(limits)
    return alpha, seconds


def _media(profile: NetworkProfile, a: int, b: int) -> list[tuple[str, int]]:
    one, other = profile.sites[a].medium, profile.sites[b].medium
    relayed = {medium.name: medium.relayed for medium in profile.media}
    if one is not None and one == other:
        return [(one, 2 if relayed[one] else 1)]
    return [(name, 1) for name in (one, other) if name is not None]


def _by_owners(profile: NetworkProfile, owners: int, nbytes: int, side_nbytes: int) -> float:
    r"""To the owners of the shards and back, in :math:`P` pieces.

    .. math:: \alpha_2 + T_1 + T_2 \quad (P = 1), \qquad
        \max\big( \alpha_2 + T_1 + T_2 / P,\ \alpha_2 + T_1 / P + T_2,\ \alpha + T_{12} \big)

    :math:`T_1, T_2` is what the busiest capacity needs for the way there and for the way back, :math:`T_{12}` for
    both; :math:`\alpha_2` the longest delay to an owner and on from there, :math:`\alpha` the longest single one.
    """
    size = _size(profile)
    groups = groups_of(profile, owners)
    shard = nbytes / owners
    pieces = pieces_of(int(shard))
    gathering, spreading = mesh(groups, to_owners=True), mesh(groups, from_owners=True)
    back = side_nbytes if owners < size else 0
    first = loads_s(profile, groups, gathering, shard + side_nbytes)
    second = loads_s(profile, groups, spreading, shard + back)
    t1, t2 = max(first.values(), default=0.0), max(second.values(), default=0.0)
    there, twice = _delays(profile, groups, gathering, spreading)
    if pieces == 1:
        return twice + t1 + t2
    both = max((first.get(r, 0.0) + second.get(r, 0.0) for r in first.keys() | second.keys()), default=0.0)
    return max(twice + t1 + t2 / pieces, twice + t1 / pieces + t2, there + both)


def _delays(
    profile: NetworkProfile, groups: Sequence[Group], gathering: Sequence[Bundle], spreading: Sequence[Bundle]
) -> tuple[float, float]:
    """The longest one-way delay, and the longest way to an owner and on from there."""

    def latency(bundle: Bundle) -> float:
        return profile.connection(groups[bundle.src].site, groups[bundle.dst].site).link.latency_s

    into: dict[int, float] = {}
    out: dict[int, float] = {}
    for bundle in gathering:
        into[bundle.dst] = max(into.get(bundle.dst, 0.0), latency(bundle))
    for bundle in spreading:
        out[bundle.src] = max(out.get(bundle.src, 0.0), latency(bundle))
    return max(out.values()), max(
        into.get(owner, 0.0) + out.get(owner, 0.0) for owner in into.keys() | out.keys()
    )


def _gather(profile: NetworkProfile, nbytes: int, side_nbytes: int) -> float:
    """Everybody's payload to everybody: the longest one-way delay, and what the busiest capacity needs."""
    groups = groups_of(profile, _size(profile))
    everybody = mesh(groups)
    longest, _ = _delays(profile, groups, everybody, everybody)
    return longest + max(loads_s(profile, groups, everybody, nbytes + side_nbytes).values(), default=0.0)


def _size(profile: NetworkProfile) -> int:
    assert profile.nodes is not None
    return profile.nodes


Cost: TypeAlias = Callable[[NetworkProfile, int, int], float]
"""Seconds, from a profile, the bytes of the tensor and those of the side vector."""

COSTS: dict[str, Cost] = {
    "ring": _ring,
    "direct": lambda profile, nbytes, side: _by_owners(profile, _size(profile), nbytes, side),
    "parameter_server": lambda profile, nbytes, side: _by_owners(profile, 1, nbytes, side),
    "multi_parameter_server": lambda profile, nbytes, side: _by_owners(
        profile, (_size(profile) + 1) // 2, nbytes, side
    ),
    "all_gather": _gather,
}
"""The formulas by the name of the collective."""
