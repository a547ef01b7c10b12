"""A node's network interface: a TUN device, whose packets a process reads and writes."""

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
    "LARGEST_PACKET",
    "address_of",
    "chosen_congestion_control",
    "configure",
    "node_of",
    "open_tun",
    "take_large_packets",
    "wire_nbytes",
]

INTERFACE = "lab0"
"""The name of every node's interface, in its own namespace."""
HEADER_NBYTES = 10
"""Before each packet: how it is to be cut into segments (the virtio header), handed on as it came."""
LARGEST_PACKET = 65536 + HEADER_NBYTES
"""What one read may return."""
MTU = 1500
NETWORK = "10.77"
"""Of the nodes' addresses: its first two bytes."""

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_USO = 0x01, 0x02, 0x60
_TCP = 6


def address_of(node: int) -> str:
    """The address of a node."""
    high, low = divmod(node + 1, 256)
    return f"{NETWORK}.{high}.{low}"


def node_of(packet: bytes) -> int:
    """For which node a packet is; -1 where it is for none, as a packet of IPv6."""
    at = HEADER_NBYTES
    if packet[at] >> 4 != 4 or packet[at + 16] != 10 or packet[at + 17] != 77:
        return -1
    return (packet[at + 18] << 8 | packet[at + 19]) - 1


def wire_nbytes(packet: bytes) -> int:
    """How long a packet is on the wire: a large one has the headers of each of its segments."""
    nbytes = len(packet) - HEADER_NBYTES
    segment = packet[4] | packet[5] << 8
    if not segment:
        return nbytes
    at = HEADER_NBYTES
    headers = (packet[at] & 15) * 4
    headers += (packet[at + headers + 12] >> 4) * 4 if packet[at + 9] == _TCP else 8
    return nbytes + headers * ((nbytes - headers - 1) // segment)


def open_tun() -> int:
    """A device in the namespace of the calling thread; it is gone when the descriptor is closed.

    Raises:
      OSError: it may not, or the kernel has no TUN.
    """
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        request = struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR)
        fcntl.ioctl(device, _TUNSETIFF, request)
        take_large_packets(device, True)
    except OSError:
        os.close(device)
        raise
    return device


def take_large_packets(device: int, wanted: bool) -> None:
    """Whether the device hands over many TCP segments, or datagrams, as one packet, or each by itself."""
    if wanted:
        with contextlib.suppress(OSError):  # before Linux 6.2 there are no large packets of datagrams
            fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_USO)
            return
    fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | (_TUN_F_TSO4 if wanted else 0))


def configure(node: int, largest_nbytes: int, congestion_control: str | None) -> None:
    """Gives the device in the calling thread's namespace its addresses and sets it up.

    Args:
      node: whose it is.
      largest_nbytes: the most that the kernel puts in one packet.
      congestion_control: of the namespace's TCP; ``None``: this machine's.

    Raises:
      OSError: the kernel refused something.
    """
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    ipv6 = Path("/proc/sys/net/ipv6/conf/all/disable_ipv6")
    if ipv6.exists():
        ipv6.write_text("1", encoding="ascii")
    if congestion_control is not None:
        _choose(congestion_control)
    # A connection's congestion window is not to be remembered for the next: each run begins alike.
    Path("/proc/sys/net/ipv4/tcp_no_metrics_save").write_text("1", encoding="ascii")
    try:
        with IPRoute() as routes:
            (loopback,) = routes.link_lookup(ifname="lo")
            (device,) = routes.link_lookup(ifname=INTERFACE)
            routes.link("set", index=loopback, state="up")
            routes.link("set", index=device, mtu=MTU, txqlen=10_000)
            routes.link("set", index=device, gso_max_size=max(largest_nbytes, 2 * MTU))
            routes.addr("add", index=device, address=address_of(node), prefixlen=16)
            routes.link("set", index=device, state="up")
    except NetlinkError as error:
        raise OSError(error.code, f"setting up {INTERFACE}: {error}") from None


def chosen_congestion_control() -> str:
    """Of the TCP in the calling thread's namespace."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text(encoding="ascii").strip()


def _choose(congestion_control: str) -> None:
    try:
        Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(congestion_control, encoding="ascii")
    except OSError:
        allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text(encoding="ascii")
        raise OSError(
            errno.EPERM,
            f"congestion control {congestion_control!r}: allowed on this machine: {allowed.strip()}; "
            "--congestion-control takes another",
        ) from None
