"""Networks: links between nodes, and the shares of flows."""

from typing import TYPE_CHECKING

from farflung.lazy import build_lazy_attributes

if TYPE_CHECKING:
    from farflung.network.catalog import NETWORKS, find_network
    from farflung.network.costs import count_pieces
    from farflung.network.fabric import Fabric, Flow
    from farflung.network.link import BandwidthTrace, Link
    from farflung.network.loading import format_profile, load_profile
    from farflung.network.max_min import compute_max_min_rates
    from farflung.network.profile import Medium, NetworkProfile, Site, SiteLink
    from farflung.network.tcp import (
        TcpModel,
        choose_num_connections,
        compute_repair_s,
        compute_window_bps,
        create_tcp_model,
    )
    from farflung.network.wiring import NetworkPath, ResourceUse, Wiring
else:
    __getattr__, __dir__ = build_lazy_attributes(
        __name__,
        {
            "costs": "count_pieces",
            "fabric": "Fabric Flow",
            "link": "Link BandwidthTrace",
            "loading": "format_profile load_profile",
            "max_min": "compute_max_min_rates",
            "catalog": "NETWORKS find_network",
            "profile": "SiteLink Medium NetworkProfile Site",
            "tcp": "TcpModel choose_num_connections compute_repair_s compute_window_bps create_tcp_model",
            "wiring": "NetworkPath ResourceUse Wiring",
        },
    )

__all__ = [
    "NETWORKS",
    "BandwidthTrace",
    "Fabric",
    "Flow",
    "Link",
    "Medium",
    "NetworkPath",
    "NetworkProfile",
    "ResourceUse",
    "Site",
    "SiteLink",
    "TcpModel",
    "Wiring",
    "choose_num_connections",
    "compute_max_min_rates",
    "compute_repair_s",
    "compute_window_bps",
    "count_pieces",
    "create_tcp_model",
    "find_network",
    "format_profile",
    "load_profile",
]
