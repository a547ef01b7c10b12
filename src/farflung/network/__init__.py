"""Networks: links between nodes, and the shares of flows."""

from typing import TYPE_CHECKING

from farflung.lazy import lazy

if TYPE_CHECKING:
    from farflung.network.costs import pieces_of
    from farflung.network.fabric import Fabric, Flow
    from farflung.network.link import Link, Trace
    from farflung.network.loading import load_profile
    from farflung.network.max_min import max_min_rates
    from farflung.network.named import NETWORKS, network_profile
    from farflung.network.profile import Connection, Medium, NetworkProfile, Site
    from farflung.network.tcp import Tcp, connections_for, repaired_s, window_share_bps
    from farflung.network.wiring import Path, Use, Wiring
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "costs": "pieces_of",
            "fabric": "Fabric Flow",
            "link": "Link Trace",
            "loading": "load_profile",
            "max_min": "max_min_rates",
            "named": "NETWORKS network_profile",
            "profile": "Connection Medium NetworkProfile Site",
            "tcp": "Tcp connections_for repaired_s window_share_bps",
            "wiring": "Path Use Wiring",
        },
    )

__all__ = [
    "NETWORKS",
    "Connection",
    "Fabric",
    "Flow",
    "Link",
    "Medium",
    "NetworkProfile",
    "Path",
    "Site",
    "Tcp",
    "Trace",
    "Use",
    "Wiring",
    "connections_for",
    "load_profile",
    "max_min_rates",
    "network_profile",
    "pieces_of",
    "repaired_s",
    "window_share_bps",
]
