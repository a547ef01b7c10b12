"""Networks: what lies between the nodes, and how flows share it."""

from farflung.network.costs import pieces_of
from farflung.network.device import DeviceProfile, Layer
from farflung.network.devices import DEVICES, device_profile, device_toml, load_device
from farflung.network.fabric import Fabric, Flow
from farflung.network.link import Link
from farflung.network.loading import load_profile
from farflung.network.max_min import max_min_rates
from farflung.network.memory import OPTIMIZER_COPIES, largest_batch, saved_nbytes, training_nbytes
from farflung.network.named import NETWORKS, network_profile
from farflung.network.profile import Connection, Medium, NetworkProfile, Site
from farflung.network.stragglers import Moment, Occasional, Scheduled, Straggler, Varying
from farflung.network.trace import Trace
from farflung.network.wiring import Path, Use, Wiring, is_dedicated

__all__ = [
    "DEVICES",
    "NETWORKS",
    "OPTIMIZER_COPIES",
    "Connection",
    "DeviceProfile",
    "Fabric",
    "Flow",
    "Layer",
    "Link",
    "Medium",
    "Moment",
    "NetworkProfile",
    "Occasional",
    "Path",
    "Scheduled",
    "Site",
    "Straggler",
    "Trace",
    "Use",
    "Varying",
    "Wiring",
    "device_profile",
    "device_toml",
    "is_dedicated",
    "largest_batch",
    "load_device",
    "load_profile",
    "max_min_rates",
    "network_profile",
    "pieces_of",
    "saved_nbytes",
    "training_nbytes",
]
