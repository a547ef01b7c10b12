"""Network interface of a node: a TUN device, whose packets a process reads and writes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from pathlib import Path

__all__ = [
    "HEADER_NBYTES",
    "INTERFACE",
    "MAX_READ_NBYTES",
    "build_address",
    "compute_wire_nbytes",
    "configure_tun",
    "create_tun",
    "parse_node",
    "read_congestion_control",
    "set_large_packets",
]

INTERFACE = "lab0"
"""Name of every node's interface, in its own namespace."""
HEADER_NBYTES = 10
"""Length of the virtio header before each packet, which tells how to segment it and is passed on unchanged."""
MAX_READ_NBYTES = 65536 + HEADER_NBYTES
"""Maximum bytes of one read."""
MTU = 1500
NETWORK = "10.77"
"""First two bytes of the nodes' addresses."""

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_USO = 0x01, 0x02, 0x60
_TCP = 6


def build_address(node: int) -> str:
    """Returns the address of a node."""
    high, low = divmod(node + 1, 256)
    return f"{NETWORK}.{high}.{low}"


def parse_node(packet: bytes) -> int:
    """Returns the destination node of a packet; -1 if it has none, such as a packet of IPv6."""
    start = HEADER_NBYTES
    if packet[start] >> 4 != 4 or packet[start + 16] != 10 or packet[start + 17] != 77:
        return -1
    return (packet[start + 18] << 8 | packet[start + 19]) - 1


def compute_wire_nbytes(packet: bytes) -> int:
    """Returns the length of a packet on the wire; a large one has the headers of each of its segments."""
    nbytes = len(packet) - HEADER_NBYTES
    segment = packet[4] | packet[5] << 8
    if not segment:
        return nbytes
    start = HEADER_NBYTES
    headers = (packet[start] & 15) * 4
    headers += (packet[start + headers + 12] >> 4) * 4 if packet[start + 9] == _TCP else 8
    return nbytes + headers * ((nbytes - headers - 1) // segment)


def create_tun() -> int:
    """Creates a device in the namespace of the calling thread; closing the descriptor removes it.

    Raises:
      OSError: The call is not permitted, or the kernel has no TUN.
    """
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        request = struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR)
        fcntl.ioctl(device, _TUNSETIFF, request)
        set_large_packets(device, True)
    except OSError:
        os.close(device)
        raise
    return device


def set_large_packets(device: int, is_enabled: bool) -> None:
    """Sets whether the device combines many TCP segments, or datagrams, into one packet."""
    if is_enabled:
        with contextlib.suppress(OSError):  # Linux before 6.2 cannot combine datagrams
            fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_USO)
            return
    fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | (_TUN_F_TSO4 if is_enabled else 0))


def configure_tun(node: int, gso_max_nbytes: int, congestion_control: str | None) -> None:
    """Configures the TUN device of the calling thread's namespace: address, MTU, GSO limit and congestion control.

    Args:
      node: Node of the device.
      gso_max_nbytes: Maximum bytes that the kernel puts in one packet.
      congestion_control: Congestion control of the namespace's TCP; ``None`` for this machine's.

    Raises:
      OSError: The kernel refused a setting.
    """
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    ipv6 = Path("/proc/sys/net/ipv6/conf/all/disable_ipv6")
    if ipv6.exists():
        ipv6.write_text("1", encoding="ascii")
    if congestion_control is not None:
        _set_congestion_control(congestion_control)
    # Runs begin equally if the kernel remembers no congestion windows of earlier connections.
    Path("/proc/sys/net/ipv4/tcp_no_metrics_save").write_text("1", encoding="ascii")
    try:
        with IPRoute() as routes:
            (loopback,) = routes.link_lookup(ifname="lo")
            (device,) = routes.link_lookup(ifname=INTERFACE)
            routes.link("set", index=loopback, state="up")
            routes.link("set", index=device, mtu=MTU, txqlen=10_000)
            routes.link("set", index=device, gso_max_size=max(gso_max_nbytes, 2 * MTU))
            routes.addr("add", index=device, address=build_address(node), prefixlen=16)
            routes.link("set", index=device, state="up")
    except NetlinkError as error:
        raise OSError(error.code, f"setting up {INTERFACE}: {error}") from None


def read_congestion_control() -> str:
    """Reads the congestion control of TCP in the calling thread's namespace."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text(encoding="ascii").strip()


def _set_congestion_control(congestion_control: str) -> None:
    """Sets the congestion control of the current namespace; raises OSError with the allowed ones."""
    try:
        Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(congestion_control, encoding="ascii")
    except OSError:
        allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text(encoding="ascii")
        raise OSError(
            errno.EPERM,
            f"congestion control {congestion_control!r}: allowed on this machine: {allowed.strip()}; "
            "--congestion-control takes another",
        ) from None
