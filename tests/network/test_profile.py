"""Profiles: which link joins whom, other numbers of nodes, other scales, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.errors import ConfigError, UnknownName
from farflung.network import (
    NETWORKS,
    BandwidthTrace,
    Link,
    Medium,
    NetworkProfile,
    Site,
    SiteLink,
    Wiring,
    choose_num_connections,
    find_network,
)

NEAR, FAR, BACK = Link(0.001, 1e9), Link(0.05, 1e6), Link(0.06, 2e6)
TWO_SITES = NetworkProfile(
    "two",
    (Site("a", 2, NEAR, up_bps=5e6), Site("b", None, NEAR, medium="air")),
    (SiteLink("a", "b", FAR, shared=True), SiteLink("b", "a", BACK)),
    (Medium("air", 3e6, relayed=True),),
)


# --- links ------------------------------------------------------------------------------------------------------


def test_links_by_node() -> None:
    profile = TWO_SITES.with_nodes(5)
    assert [profile.get_site_index(node) for node in range(5)] == [0, 0, 1, 1, 1]
    assert profile.get_link(0, 1) == profile.get_link(3, 4) == NEAR
    assert profile.get_link(1, 2) == FAR
    assert profile.get_link(4, 0) == BACK


def test_paths_use_what_they_cross() -> None:
    wiring = Wiring(TWO_SITES.with_nodes(5))

    def limits(src: int, dst: int) -> list[tuple[float, int]]:
        return sorted((wiring.capacities[use.resource], use.times) for use in wiring.get_path(src, dst).uses)  # type: ignore[misc]

    assert limits(0, 1) == [(5e6, 1), (1e9, 1)]
    assert limits(0, 2) == [(1e6, 1), (3e6, 1), (5e6, 1)]
    assert limits(2, 3) == [(3e6, 2), (1e9, 1)]

    def resources(src: int, dst: int) -> set[int]:
        return {use.resource for use in wiring.get_path(src, dst).uses}

    assert len(resources(0, 2) & resources(1, 3)) == 2  # the shared link and the air, not the nodes' own up
    assert resources(2, 0).isdisjoint(resources(0, 2)) is False  # the air has no direction
    assert wiring.get_path(0, 2) is wiring.get_path(0, 2)


def test_loss_is_less_throughput() -> None:
    assert Link(0.1, 1e6).compute_goodput_bps(0.2) == 1e6
    slow = Link(0.1, 1e6, loss=0.01)
    # CUBIC: 1.054 (0.2 / 0.01)^0.75 = 9.97 packets; Reno: sqrt(150) = 12.25 packets; 0.2 s round trip.
    assert slow.compute_goodput_bps(0.2) == pytest.approx(8 * 1448 * math.sqrt(150) / 0.2)
    long = Link(0.5, 1e9, loss=1e-4)
    assert long.compute_goodput_bps(1.0) == pytest.approx(8 * 1448 * 1.054 * 1e4**0.75)
    assert Link(0.0, 1e6, loss=0.25).compute_goodput_bps(0.0) == 0.75e6
    assert Link(0.001, 1e3, loss=0.25).compute_goodput_bps(0.002) == 750.0
    assert Link(0.0, BandwidthTrace((0.0,), (8.0,), 1.0), loss=0.5).compute_goodput_bps(
        0.0
    ) == BandwidthTrace((0.0,), (4.0,), 1.0)


def test_what_a_flow_gets_under_loss_depends_on_the_congestion_control() -> None:
    link = Link(0.5, 1e9, loss=1e-4)
    assert link.compute_goodput_bps(1.0, "cubic") == link.compute_goodput_bps(1.0)
    assert link.compute_goodput_bps(1.0, "reno") == pytest.approx(8 * 1448 * math.sqrt(1.5e4))
    assert link.compute_goodput_bps(1.0, "bbr") == pytest.approx(0.9999e9)
    assert replace(link, loss=0.19).compute_goodput_bps(1.0, "bbr") == pytest.approx(0.81e9)
    assert replace(link, loss=0.2).compute_goodput_bps(1.0, "bbr") == replace(
        link, loss=0.2
    ).compute_goodput_bps(1.0, "reno")
    profile = replace(NetworkProfile.create_uniform(link), congestion="reno")
    assert profile.compute_goodput_bps(0, 0) == link.compute_goodput_bps(1.0, "reno")


def test_each_of_several_connections_has_a_window_of_its_own() -> None:
    link = Link(0.1, 5e6, loss=0.01)
    one = link.compute_goodput_bps(0.2)
    assert isinstance(one, float)
    assert [link.compute_goodput_bps(0.2, connections=count) for count in (2, 7, 64)] == [
        2 * one,
        0.99 * 5e6,
        0.99 * 5e6,
    ]
    profile = replace(NetworkProfile.create_uniform(link), tcp_connections=2)
    assert profile.compute_goodput_bps(0, 0) == 2 * one
    auto = replace(profile, tcp_connections="auto")
    assert auto.count_connections(0, 0) == math.ceil(0.99 * 5e6 / one) == 7
    assert auto.compute_goodput_bps(0, 0) == 0.99 * 5e6
    assert replace(auto, congestion="bbr").count_connections(0, 0) == 1
    narrow = replace(auto, sites=(replace(auto.sites[0], up_bps=2e6),))
    assert narrow.count_connections(0, 0) == 3


def test_connections_fill_the_way() -> None:
    assert choose_num_connections(1e9, 0.0, 0.0) == choose_num_connections(math.inf, 0.0, 0.5) == 1
    # Without loss the send buffer of 4 MiB limits one: 335 Mbit/s at a round trip of 0.1 s.
    assert [choose_num_connections(bps, 0.1, 0.0) for bps in (335e6, 336e6, 1e9, 1e12, math.inf)] == [
        1,
        2,
        3,
        16,
        16,
    ]
    assert [choose_num_connections(100e6, 0.15, loss) for loss in (1e-6, 1e-5, 1e-4, 1e-3, 0.02)] == [
        1,
        1,
        6,
        16,
        16,
    ]


@given(st.floats(1e3, 1e12), st.floats(0.0, 1.0), st.floats(0.0, 0.5), st.floats(1.0, 4.0))
def test_a_faster_or_longer_way_takes_no_fewer_connections(
    bps: float, round_trip_s: float, loss: float, more: float
) -> None:
    count = choose_num_connections(bps, round_trip_s, loss)
    assert 1 <= count <= min(choose_num_connections(more * bps, round_trip_s, loss), 16)
    assert count <= choose_num_connections(bps, more * round_trip_s, loss)


@pytest.mark.parametrize(("count", "said"), [(0, "0"), ("some", "'some'"), (1.5, "1.5"), (True, "True")])
def test_a_number_of_connections_is_checked(count: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"uniform: connections = {said}: must be from 1 to 64, or auto"):
        replace(NetworkProfile.create_uniform(Link(0.1)), tcp_connections=count)


def test_settings_of_tcp_stand_behind_a_name() -> None:
    found = find_network("four-regions(congestion=bbr, connections=8)")
    assert (found.name, found.congestion, found.tcp_connections) == (
        "four-regions(congestion=bbr, connections=8)", "bbr", 8,
    )  # fmt: skip
    assert find_network("lan-1g(connections=auto)").tcp_connections == "auto"
    for wrong, said in (
        ("connections=0", "connections = 0"),
        ("window=3", "window: must be one of congestion"),
    ):
        with pytest.raises(ConfigError, match=f"lan-1g: {said}"):
            find_network(f"lan-1g({wrong})")


def test_the_round_trip_counts_both_ways() -> None:
    lossy = Link(0.05, 1e9, loss=0.01)
    one_way = NetworkProfile(
        "x", (Site("a", 1), Site("b", 1)), (SiteLink("a", "b", lossy), SiteLink("b", "a", Link(0.15)))
    )
    assert one_way.compute_goodput_bps(0, 1) == lossy.compute_goodput_bps(0.2)


# --- other numbers of nodes -------------------------------------------------------------------------------------


def test_open_sites_share_out_the_nodes() -> None:
    names = [site.name for site in find_network("four-regions").sites]
    spread = find_network("four-regions").with_nodes(6)
    assert [(site.name, site.nodes) for site in spread.sites] == list(zip(names, [2, 2, 1, 1], strict=True))
    few = find_network("four-regions").with_nodes(2)
    assert [site.name for site in few.sites] == names[:2]
    assert few.get_link(0, 1) == spread.get_link(0, 2)
    assert TWO_SITES.with_nodes(3).nodes == 3
    assert TWO_SITES.nodes is None


@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_fixed_number_is_fixed(count: int) -> None:
    with pytest.raises(ConfigError, match=f"10gbe-4: nodes: it describes 4 nodes, and {count} are to run"):
        find_network("10gbe-4").with_nodes(count)


def test_too_few_nodes_for_those_that_are_fixed() -> None:
    with pytest.raises(ConfigError, match="it describes 2 nodes, and 1 are to run"):
        TWO_SITES.with_nodes(1)


# --- other scales -----------------------------------------------------------------------------------------------


def test_scaled_changes_everything_and_says_so() -> None:
    trace = BandwidthTrace((0.0, 1.0), (4.0, 2.0), 2.0)
    profile = NetworkProfile(
        "p",
        (Site("a", 2, Link(0.1, 8.0, 0.05, 0.5), up_bps=trace, exit_bps=6.0), Site("b", 1, medium="m")),
        (SiteLink("a", "b", FAR), SiteLink("b", "a", BACK)),
        (Medium("m", 10.0),),
        default=NEAR,
    )
    scaled = profile.scale(latency=3.0, bandwidth=0.5, trace_time=2.0)
    assert scaled.sites[0].inside == Link(0.1 * 3.0, 4.0, 0.05 * 3.0, 0.5)
    assert scaled.sites[0].up_bps == BandwidthTrace((0.0, 2.0), (2.0, 1.0), 4.0)
    assert scaled.sites[0].exit_bps == 3.0
    assert scaled.sites[0].down_bps == math.inf
    assert scaled.media[0].bandwidth_bps == 5.0
    assert scaled.site_links[0].link == Link(0.05 * 3.0, 0.5e6)
    assert scaled.default == Link(0.001 * 3.0, 0.5e9)
    assert scaled.changes == ("latency x 3, bandwidth x 0.5, time of traces x 2",)
    assert scaled.scale(bandwidth=2.0).changes[1:] == ("bandwidth x 2",)
    assert profile.scale() is profile


def test_standing_in_keeps_both_ratios() -> None:
    paper = find_network("wifi-50mbps")
    small = paper.scale_for_model(nbytes=3e5, step_s=0.1, for_nbytes=45e6, for_step_s=1.5)
    before, after = paper.sites[0], small.sites[0]
    assert before.inside is not None
    assert after.inside is not None
    assert after.inside.latency_s / 0.1 == pytest.approx(before.inside.latency_s / 1.5)
    assert isinstance(before.up_bps, float)
    assert isinstance(after.up_bps, float)
    assert 3e5 / (after.up_bps * 0.1) == pytest.approx(45e6 / (before.up_bps * 1.5))
    assert small.changes == (
        "300000 bytes every 0.1 s stand in for 4.5e+07 bytes every 1.5 s: "
        "latency x 0.0666667, bandwidth x 0.1, time of traces x 0.0666667",
    )
    same = paper.scale_for_model(nbytes=1.0, step_s=1.0, for_nbytes=1.0, for_step_s=1.0)
    assert same.changes == ("1 bytes every 1 s stand in for 1 bytes every 1 s: as it is",)


@pytest.mark.parametrize("factors", [{"latency": -1.0}, {"bandwidth": 0.0}, {"bandwidth": math.nan}])
def test_no_such_scale(factors: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"scaled by {next(iter(factors))}"):
        TWO_SITES.scale(**factors)  # type: ignore[arg-type]


def test_standing_in_for_nothing() -> None:
    with pytest.raises(ConfigError, match="standing in with step_s = 0"):
        TWO_SITES.scale_for_model(nbytes=1, step_s=0, for_nbytes=1, for_step_s=1)


# --- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"latency_s": -1.0}, "latency_s = -1.0"),
        ({"latency_s": math.inf}, "latency_s = inf"),
        ({"bandwidth_bps": 0.0}, "bandwidth_bps = 0.0"),
        ({"bandwidth_bps": math.nan}, "bandwidth_bps = nan"),
        ({"latency_s": 0.1, "jitter_s": 0.2}, "jitter_s = 0.2"),
        ({"latency_s": 0.1, "jitter_s": -0.1}, "jitter_s = -0.1"),
        ({"loss": 1.0}, "loss = 1.0"),
        ({"loss": -0.1}, "loss = -0.1"),
    ],
)
def test_no_such_link(arguments: dict[str, float], what: str) -> None:
    with pytest.raises(ConfigError, match=f"^{what}"):
        Link(**arguments)


def two(**changed: Any) -> NetworkProfile:
    settings: dict[str, Any] = {
        "sites": (Site("a", 1), Site("b", 1)),
        "site_links": (SiteLink("a", "b", FAR), SiteLink("b", "a", FAR)),
    }
    return NetworkProfile("p", **{**settings, **changed})


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"sites": ()}, "p: site: a profile needs at least one"),
        ({"sites": (Site("a", 1), Site("a", 1))}, "p: site: a is there twice"),
        ({"site_links": (SiteLink("a", "b", FAR),)}, "p: link: none leads from b to a"),
        ({"site_links": (SiteLink("a", "c", FAR),)}, "p: link from a to c: no site is named 'c'"),
        ({"site_links": (SiteLink("a", "b", FAR),) * 2}, "p: link: a to b is there twice"),
        ({"sites": (Site("a", 2), Site("b", 1))}, "p: site a: inside: its nodes have no link to each other"),
        ({"sites": (Site("a", 1, medium="air"), Site("b", 1))}, "p: site a: medium: none is named 'air'"),
        ({"media": (Medium("m", 1.0), Medium("m", 1.0))}, "p: medium: m is there twice"),
    ],
)
def test_no_such_profile(changed: dict[str, Any], what: str) -> None:
    assert two().nodes == 2
    with pytest.raises(ConfigError, match=what):
        two(**changed)


def test_no_such_site_or_medium() -> None:
    with pytest.raises(ConfigError, match=r"^nodes = 0"):
        Site("a", 0)
    with pytest.raises(ConfigError, match=r"^up_bps = -1"):
        Site("a", up_bps=-1)
    with pytest.raises(ConfigError, match=r"^bandwidth_bps = 0"):
        Medium("m", 0)


# --- by name ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_by_name(name: str) -> None:
    profile = find_network(name)
    assert profile.name == name
    assert profile.source
    for size in {profile.nodes or 2, profile.nodes or 7}:
        fitted = profile.with_nodes(size)
        assert fitted.nodes == size
        for src in range(size):
            for dst in range(size):
                if src != dst:
                    assert fitted.get_link(src, dst).latency_s > 0
                    assert Wiring(fitted).get_path(src, dst).uses


def test_an_unknown_name() -> None:
    with pytest.raises(UnknownName, match=r"unknown network 'wifi'; known: .*, or a file ending in .toml"):
        find_network("wifi")


def test_figures_of_the_papers() -> None:
    regions = find_network("four-regions").with_nodes(4)
    london, ohio, california, tokyo = range(4)
    pairs = {
        (london, ohio): (140, 23),
        (california, tokyo): (183, 17),
        (ohio, california): (35, 63),
        (london, tokyo): (277, 13),
    }
    for (one, other), (ms, mbps) in pairs.items():
        for link in (regions.get_link(one, other), regions.get_link(other, one)):
            assert link.latency_s == pytest.approx(ms / 2000)
            assert link.bandwidth_bps == mbps * 1e6
    cities = find_network("shanghai-boston").with_nodes(2).get_link(0, 1)
    assert cities.latency_s - cities.jitter_s == pytest.approx(0.078 / 2)
    assert cities.latency_s == 0.7 / 2
