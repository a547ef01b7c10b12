"""Catalog of network profiles, with the sources of their figures."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from farflung.errors import ConfigError, UnknownName
from farflung.network.link import Link
from farflung.network.loading import load_profile
from farflung.network.profile import Medium, NetworkProfile, Site, SiteLink

__all__ = ["NETWORKS", "find_network"]

_SETTINGS_PATTERN = re.compile(r"(?P<name>.+)\((?P<settings>\w+=\w+(, *\w+=\w+)*)\)")
_SETTING_FIELDS = {"congestion": "congestion", "connections": "tcp_connections"}
"""Settings in brackets after a name, and the fields of a profile that they set."""


def find_network(name: str) -> NetworkProfile:
    """Finds a profile by its name in :data:`NETWORKS`, or loads a TOML file if ``name`` ends in ``.toml``.

    Settings of TCP may follow, as in ``four-regions(congestion=bbr, connections=auto)``.

    Raises:
      UnknownName: there is no such name.
      ConfigError: the file is invalid (names file and key), or there is no such setting.
    """
    if (match := _SETTINGS_PATTERN.fullmatch(name)) is not None:
        profile, settings = find_network(match["name"]), dict[str, Any]()
        for setting, value in (pair.strip().split("=") for pair in match["settings"].split(",")):
            if setting not in _SETTING_FIELDS:
                raise ConfigError(f"{match['name']}: {setting}: must be one of {', '.join(_SETTING_FIELDS)}")
            settings[_SETTING_FIELDS[setting]] = value
        changed = replace(profile, **settings)
        return replace(changed, name=f"{profile.name}({match['settings']})")
    if name.endswith(".toml"):
        return load_profile(Path(name))
    if name not in NETWORKS:
        raise UnknownName("network", name, NETWORKS, "a file ending in .toml")
    return NETWORKS[name]


def _build_lan(
    name: str, bps: float, latency_s: float, source: str, nodes: int | None = None
) -> NetworkProfile:
    """Builds the profile of one switch that never blocks: each node has its own cable."""
    return NetworkProfile(
        name, (Site("switch", nodes, Link(latency_s), up_bps=bps, down_bps=bps),), source=source
    )


def _build_wifi(mbps: int) -> NetworkProfile:
    """Builds the profile of Mercury (Zeng et al. 2021): devices around one router, each limited to ``mbps``."""
    rate = mbps * 1e6
    return NetworkProfile(
        f"wifi-{mbps}mbps",
        (Site("router", inside=Link(2e-3), up_bps=rate, down_bps=rate),),
        source=(
            f"{mbps} Mbit/s: Zeng et al. 2021 (Mercury), section 5, shaped by tc. Each device has the rate for itself, "
            "in each direction: inferred from Fig. 17, where 4, 8 and 12 devices gain alike, which one channel shared "
            "by all would not allow. 2 ms one way: our choice."
        ),
    )


def _build_mobile(name: str, down_bps: float, up_bps: float, link: Link, source: str) -> NetworkProfile:
    """Builds the profile of phones of one provider: two radio links with the core network between."""
    return NetworkProfile(
        name, (Site("phones", inside=link, up_bps=up_bps, down_bps=down_bps),), source=source
    )


_ROUND_TRIPS = {  # milliseconds, Mbit/s
    ("london", "ohio"): (140, 23),
    ("california", "tokyo"): (183, 17),
    ("ohio", "california"): (35, 63),
    ("london", "tokyo"): (277, 13),
    ("ohio", "tokyo"): (35 + 183, 17),
    ("london", "california"): (140 + 35, 23),
}
_REGION, _CITY = Link(3e-6, 25e9), Link(100e-6, 1e9)
_PACIFIC = Link(350e-3, 10e6, jitter_s=350e-3 - 39e-3)
_PROFILES = (
    NetworkProfile(
        "loopback",
        (Site("machine", inside=Link(50e-6, 20e9)),),
        source="Our choice: 50 us between two processes, and 20 Gbit/s for each pair.",
    ),
    _build_lan("lan-1g", 1e9, 100e-6, "Our choice: gigabit Ethernet, 0.2 ms round trip."),
    _build_lan(
        "infiniband",
        100e9,
        3e-6,
        "3 us in the cluster: DTS poster (Zhu et al. 2019). 100 Gbit/s (EDR): our choice.",
    ),
    _build_lan(
        "10gbe-4",
        10e9,
        50e-6,
        "Four nodes, 10 Gbit/s Ethernet: Li et al. 2018 (Pipe-SGD), as remembered. 50 us: our choice.",
        nodes=4,
    ),
    NetworkProfile(
        "edge-5gbps",
        tuple(
            Site(f"server-{number}", inside=Link(50e-6, 20e9), exit_bps=5e9, entry_bps=5e9)
            for number in range(4)
        ),
        default=Link(100e-6),
        source=(
            "Four servers, one container for each device, 5 Gbit/s between servers: Tyagi & Swany 2022 (ScaDLES). "
            "That containers share their server's 5 Gbit/s, 100 us between servers, and 50 us and 20 Gbit/s within "
            "one: our choice."
        ),
    ),
    *map(_build_wifi, (10, 50, 100, 200)),
    NetworkProfile(
        "wifi-shared-100mbps",
        (Site("air", inside=Link(2e-3), medium="channel"),),
        media=(Medium("channel", 100e6, relayed=True),),
        source=(
            "Our choice: 100 Mbit/s of air time for all devices together; what goes from device to device is sent "
            "twice, to the access point and from there. 2 ms one way."
        ),
    ),
    _build_mobile(
        "4g",
        21.3e6,
        6.3e6,
        Link(55e-3, jitter_s=11e-3),
        (
            "21.3 Mbit/s down, 6.3 up, 44.1 to 66.4 ms: Opensignal, State of Mobile: USA, May 2019. The latency is a "
            "round trip from a phone to a server, so about one way from phone to phone: our reading."
        ),
    ),
    _build_mobile(
        "5g",
        166.13e6,
        21.08e6,
        Link(30e-3, jitter_s=6e-3),
        "166.13 Mbit/s down, 21.08 up: Ookla, medians of all countries, third quarter of 2021. 30 ms: our choice.",
    ),
    NetworkProfile(
        "four-regions",
        tuple(Site(city, inside=_REGION) for city in ("london", "ohio", "california", "tokyo")),
        tuple(
            SiteLink(*pair, Link(ms / 2e3, mbps * 1e6))
            for (first, second), (ms, mbps) in _ROUND_TRIPS.items()
            for pair in ((first, second), (second, first))
        ),
        source=(
            "London, Ohio, California and Tokyo. "
            "DTS slides (Zhu et al. 2019): 140, 183, 35 and 277 ms; 23, 17, 63 and 13 Mbit/s. Read as round trips, "
            "halved here: the slides' ideal of 78 ms for Shanghai-Boston is light over 11,730 km and back. Inferred: "
            "which pair has which (London-Tokyo 277/13 and Ohio-California 35/63 from where they stand; London-Ohio "
            "140 and California-Tokyo 183 in the order of the poster's 97 and 102 ms; bandwidth falling as latency "
            "rises). Our choice: the two pairs not given go over the neighbour between (London-California and "
            "Ohio-Tokyo: delays added, the narrower bandwidth); each pair of nodes has the bandwidth for itself; "
            "3 us (poster) and 25 Gbit/s in a region."
        ),
    ),
    NetworkProfile(
        "shanghai-boston",
        (Site("shanghai", inside=_CITY), Site("boston", inside=_CITY)),
        (SiteLink("shanghai", "boston", _PACIFIC), SiteLink("boston", "shanghai", _PACIFIC)),
        source=(
            "Shanghai and Boston, 10 Mbit/s, 700 ms round trip. "
            "DTS slides (Zhu et al. 2019): round trips of 78 ms ideal, more than 700 ms in fact, 10 Mbit/s. Halved "
            "for one way. Our choice for the high variance: uniform, with 350 ms as the mean and the ideal 39 ms as "
            "the least. 100 us and 1 Gbit/s in a city: our choice."
        ),
    ),
)
NETWORKS = {profile.name: profile for profile in _PROFILES}
"""Profiles by name."""
