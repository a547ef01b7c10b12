"""Profile of a network between nodes: sites, the links between them, and shared capacities."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, get_args

from farflung.errors import ConfigError
from farflung.network.link import (
    Capacity,
    Link,
    check_capacity,
    combine_losses,
    compute_mean_capacity,
    scale_capacity,
)
from farflung.network.tcp import AUTO, CongestionControl, Connections, choose_num_connections
from farflung.options import MAX_CONNECTIONS, require

__all__ = ["MAX_NODES", "Medium", "NetworkProfile", "Site", "SiteLink"]

MAX_NODES = 1_000_000
"""Largest number of nodes of a site."""


@dataclass(frozen=True, slots=True)
class Site:
    """Nodes that are equal to the network: one device, the machines of an office, a class of a million phones.

    Args:
      name: Name, for links and messages.
      nodes: Number of nodes; None leaves it to :meth:`NetworkProfile.with_nodes`.
      inside: Link between any two of them; None for the profile's default.
      up_bps: Rate at which one node can send to all others together.
      down_bps: Rate at which one node can receive from all others together.
      exit_bps: Rate at which all of them together can send to other sites.
      entry_bps: Rate at which all of them together can receive from other sites.
      medium: Name of their medium.

    Raises:
      ConfigError: a value is out of its range; begins with its name.
    """

    name: str
    nodes: int | None = None
    inside: Link | None = None
    up_bps: Capacity = math.inf
    down_bps: Capacity = math.inf
    exit_bps: Capacity = math.inf
    entry_bps: Capacity = math.inf
    medium: str | None = None

    def __post_init__(self) -> None:
        is_possible = self.nodes is None or 1 <= self.nodes <= MAX_NODES
        require(is_possible, "nodes", self.nodes, f"from 1 to {MAX_NODES:,}")
        for name in ("up_bps", "down_bps", "exit_bps", "entry_bps"):
            check_capacity(name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class SiteLink:
    """Link from the nodes of one site to those of another.

    Args:
      src: Name of the sending site.
      dst: Name of the receiving site.
      link: Link of each pair of nodes.
      shared: True if all pairs of nodes share the link's bandwidth; otherwise each pair has all of it.
    """

    src: str
    dst: str
    link: Link
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Medium:
    """Medium that all flows of its sites share, in both directions: one Wi-Fi channel, one radio cell.

    Args:
      name: Name, for sites and messages.
      bandwidth_bps: Bandwidth of all flows together.
      relayed: True if a flow between two of its nodes crosses it twice, as through an access point.

    Raises:
      ConfigError: the bandwidth is 0.
    """

    name: str
    bandwidth_bps: Capacity
    relayed: bool = False

    def __post_init__(self) -> None:
        check_capacity("bandwidth_bps", self.bandwidth_bps)


@dataclass(frozen=True, slots=True)
class NetworkProfile:
    """Network profile: the links between all nodes, and the capacities that their flows share.

    Nodes are numbered site by site. All capacities limit a flow at once: it gets its share of the tightest.

    Args:
      name: Name for display.
      sites: Sites of the nodes.
      site_links: Links between sites, one for each direction.
      media: Media of the sites.
      default: Link of nodes and sites without a link of their own.
      source: Source of the figures.
      changes: Changes made to them since, oldest first.
      congestion: Congestion control of the nodes' TCP, which then has to find its rate on every connection, see
        :class:`farflung.network.TcpModel`; None gives messages the whole bandwidth from their first byte.
      tcp_connections: Number of TCP connections of each pair of nodes, each of which is a flow of its own.

    Raises:
      ConfigError: a site is named twice or missing, a medium, congestion control or number of connections is
        invalid, or a pair has no link.
    """

    name: str
    sites: tuple[Site, ...]
    site_links: tuple[SiteLink, ...] = ()
    media: tuple[Medium, ...] = ()
    default: Link | None = None
    source: str = ""
    changes: tuple[str, ...] = ()
    congestion: CongestionControl | None = None
    tcp_connections: Connections = 1
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _links: dict[tuple[str, str], SiteLink] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.sites:
            raise ConfigError(f"{self.name}: site: a profile needs at least one")
        controls = get_args(CongestionControl)
        if self.congestion not in (None, *controls):
            raise ConfigError(
                f"{self.name}: congestion = {self.congestion!r}: must be one of {', '.join(controls)}"
            )
        object.__setattr__(self, "tcp_connections", self._parse_tcp_connections())
        names, media = [site.name for site in self.sites], [medium.name for medium in self.media]
        link_names = [f"{link.src} to {link.dst}" for link in self.site_links]
        for kind, defined in (("site", names), ("medium", media), ("link", link_names)):
            if repeated := [name for name, count in Counter(defined).items() if count > 1]:
                raise ConfigError(f"{self.name}: {kind}: {repeated[0]} is there twice")
        for link in self.site_links:
            for end in (link.src, link.dst):
                if end not in names:
                    raise ConfigError(
                        f"{self.name}: link from {link.src} to {link.dst}: no site is named {end!r}"
                    )
        for site in self.sites:
            if site.medium is not None and site.medium not in media:
                raise ConfigError(f"{self.name}: site {site.name}: medium: none is named {site.medium!r}")
        object.__setattr__(self, "_links", {(link.src, link.dst): link for link in self.site_links})
        object.__setattr__(self, "_starts", (0, *accumulate(site.nodes or 0 for site in self.sites)))
        self._check_reachable()

    def _parse_tcp_connections(self) -> Connections:
        """Returns the number of connections, or "auto"; a number may be given as text."""
        connections: Any = self.tcp_connections
        if connections == AUTO:
            return AUTO
        if isinstance(connections, str) and connections.isdecimal() and len(connections) < 9:
            connections = int(connections)
        is_number = isinstance(connections, int | float) and not isinstance(connections, bool)
        if not (is_number and 1 <= connections <= MAX_CONNECTIONS and connections == int(connections)):
            text = repr(connections)[:40]
            raise ConfigError(
                f"{self.name}: connections = {text}: must be from 1 to {MAX_CONNECTIONS}, or {AUTO}"
            )
        return int(connections)

    def _check_reachable(self) -> None:
        if self.default is not None:
            return
        for src in self.sites:
            if src.inside is None and src.nodes != 1:
                raise ConfigError(
                    f"{self.name}: site {src.name}: inside: its nodes have no link to each other"
                )
            for dst in self.sites:
                if src is not dst and (src.name, dst.name) not in self._links:
                    raise ConfigError(f"{self.name}: link: none leads from {src.name} to {dst.name}")

    @staticmethod
    def create_uniform(link: Link, nodes: int | None = None, name: str = "uniform") -> NetworkProfile:
        """Creates a profile in which every ordered pair has an equal link of its own."""
        return NetworkProfile(name, (Site("all", nodes, link),))

    # --- nodes --------------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> int | None:
        """Number of nodes; None if it is left to :meth:`with_nodes`."""
        return None if any(site.nodes is None for site in self.sites) else self._starts[-1]

    @property
    def node_count(self) -> int:
        """Number of nodes, which must be set."""
        assert self.nodes is not None
        return self.nodes

    def with_nodes(self, count: int) -> NetworkProfile:
        """Returns the profile with ``count`` nodes; open sites share the rest evenly, the first ones get the remainder.

        Raises:
          ConfigError: the profile is of another number of nodes.
        """
        if self.nodes == count:
            return self
        open_sites = sum(site.nodes is None for site in self.sites)
        remaining = count - sum(site.nodes or 0 for site in self.sites)
        if not open_sites or remaining < 0:
            raise ConfigError(
                f"{self.name}: nodes: it describes {count - remaining} nodes, and {count} are to run"
            )
        base, remainder = divmod(remaining, open_sites)
        placed, num_filled = [], 0
        for site in self.sites:
            if site.nodes is None:
                num_nodes = base + (num_filled < remainder)
                num_filled += 1
                if num_nodes:
                    placed.append(replace(site, nodes=num_nodes))
            else:
                placed.append(site)
        site_names = {site.name for site in placed}
        links = tuple(link for link in self.site_links if {link.src, link.dst} <= site_names)
        return replace(self, sites=tuple(placed), site_links=links)

    def get_site_index(self, node: int) -> int:
        """Returns the index of a node's site in :attr:`sites`."""
        return bisect_right(self._starts, node) - 1

    def get_site_nodes(self, site: int) -> range:
        """Returns the nodes of one of :attr:`sites`."""
        return range(self._starts[site], self._starts[site + 1])

    # --- links --------------------------------------------------------------------------------------------------

    def get_site_link(self, src_site: int, dst_site: int) -> SiteLink:
        """Returns the link between two of :attr:`sites`, which may be equal."""
        src, dst = self.sites[src_site], self.sites[dst_site]
        if src_site == dst_site:
            link = src.inside or self.default
        elif (src.name, dst.name) in self._links:
            return self._links[src.name, dst.name]
        else:
            link = self.default
        assert link is not None
        return SiteLink(src.name, dst.name, link)

    def get_link(self, src: int, dst: int) -> Link:
        """Returns the link from one node to another."""
        return self.get_site_link(self.get_site_index(src), self.get_site_index(dst)).link

    def compute_goodput_bps(self, src_site: int, dst_site: int, extra_loss: float = 0.0) -> Capacity:
        """Computes the bandwidth of a link under its loss and some more; see :meth:`Link.compute_goodput_bps`."""
        link = self.get_site_link(src_site, dst_site).link
        lossy = replace(link, loss=combine_losses(link.loss, extra_loss))
        connections = self.count_connections(src_site, dst_site)
        return lossy.compute_goodput_bps(
            self.get_round_trip_s(src_site, dst_site), self.congestion, connections
        )

    def count_connections(self, src_site: int, dst_site: int) -> int:
        """Counts the TCP connections of two nodes; the narrowest capacity decides if the profile leaves it open."""
        if isinstance(self.tcp_connections, int):
            return self.tcp_connections
        link = self.get_site_link(src_site, dst_site).link
        limits = [
            link.bandwidth_bps,
            *(capacity for _, capacity, _ in self.iter_limits(src_site, dst_site)),
        ]
        round_trip_s = self.get_round_trip_s(src_site, dst_site)
        return choose_num_connections(
            min(map(compute_mean_capacity, limits)), round_trip_s, link.loss, self.congestion
        )

    def iter_limits(self, src_site: int, dst_site: int) -> Iterator[tuple[tuple[str, int], Capacity, int]]:
        """Yields the limits of a flow besides its link: kind, site or medium, capacity, and number of crossings."""
        src, dst = self.sites[src_site], self.sites[dst_site]
        yield ("up", src_site), src.up_bps, 1
        yield ("down", dst_site), dst.down_bps, 1
        if src_site != dst_site:
            yield ("exit", src_site), src.exit_bps, 1
            yield ("entry", dst_site), dst.entry_bps, 1
        for name in dict.fromkeys((src.medium, dst.medium)):
            for index, medium in enumerate(self.media):
                if medium.name == name:
                    is_relayed = medium.relayed and src.medium == dst.medium
                    yield ("medium", index), medium.bandwidth_bps, 1 + is_relayed

    def get_round_trip_s(self, src_site: int, dst_site: int) -> float:
        """Returns the sum of both delays between the nodes of two of :attr:`sites`, in seconds."""
        forward = self.get_site_link(src_site, dst_site).link
        backward = self.get_site_link(dst_site, src_site).link
        return forward.latency_s + backward.latency_s

    def iter_links(self) -> Iterator[Link]:
        """Yields each link that is defined anywhere."""
        yield from (site_link.link for site_link in self.site_links)
        yield from (site.inside for site in self.sites if site.inside is not None)
        if self.default is not None:
            yield self.default

    # --- other versions -----------------------------------------------------------------------------------------

    def scale(
        self, *, latency: float = 1.0, bandwidth: float = 1.0, trace_time: float = 1.0, reason: str = ""
    ) -> NetworkProfile:
        """Scales all delays, all capacities and the time of all traces; records the factors in :attr:`changes`.

        Raises:
          ConfigError: a factor is not above 0.
        """
        factors = {"latency": latency, "bandwidth": bandwidth, "time of traces": trace_time}
        for name, factor in factors.items():
            if not (factor >= 0 and math.isfinite(factor)) or (factor == 0 and name != "latency"):
                raise ConfigError(f"{self.name}: scaled by {name} = {factor}: must be a number above 0")
        description = ", ".join(f"{name} x {factor:.6g}" for name, factor in factors.items() if factor != 1.0)
        if not description and not reason:
            return self
        widen = partial(scale_capacity, factor=bandwidth, trace_time=trace_time)

        def scale_link(unscaled: Link | None) -> Link | None:
            return None if unscaled is None else unscaled.scale(latency, bandwidth, trace_time)

        return replace(
            self,
            sites=tuple(
                replace(
                    site,
                    inside=scale_link(site.inside),
                    up_bps=widen(site.up_bps),
                    down_bps=widen(site.down_bps),
                    exit_bps=widen(site.exit_bps),
                    entry_bps=widen(site.entry_bps),
                )
                for site in self.sites
            ),
            site_links=tuple(
                replace(entry, link=entry.link.scale(latency, bandwidth, trace_time))
                for entry in self.site_links
            ),
            media=tuple(replace(medium, bandwidth_bps=widen(medium.bandwidth_bps)) for medium in self.media),
            default=scale_link(self.default),
            changes=(*self.changes, f"{reason}: {description or 'as it is'}" if reason else description),
        )

    def scale_for_model(
        self, *, nbytes: float, step_s: float, for_nbytes: float, for_step_s: float
    ) -> NetworkProfile:
        r"""Scales the network for a small model in place of a paper's: equal ratios of communication to computation.

        It keeps latency over step time, and a step's bytes over the bytes that the network can carry in a step:

        .. math:: \alpha' = \alpha \frac{T'}{T}, \qquad B' = B \, \frac{n'}{n} \, \frac{T}{T'}

        Args:
          nbytes: Dense bytes that one replica exchanges in a step of the model that runs.
          step_s: Seconds of computation in its step.
          for_nbytes: Bytes of the paper's model.
          for_step_s: Seconds of the paper's model.

        Raises:
          ConfigError: one of them is not above 0.
        """
        values = {"nbytes": nbytes, "step_s": step_s, "for_nbytes": for_nbytes, "for_step_s": for_step_s}
        for name, value in values.items():
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{self.name}: standing in with {name} = {value}: must be a number above 0")
        longer = step_s / for_step_s
        return self.scale(
            latency=longer,
            bandwidth=nbytes / for_nbytes / longer,
            trace_time=longer,
            reason=f"{nbytes:g} bytes every {step_s:g} s stand in for {for_nbytes:g} bytes every {for_step_s:g} s",
        )
