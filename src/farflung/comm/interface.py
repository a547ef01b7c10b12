"""Network interfaces: the address to listen on, and the local address on a route."""

from __future__ import annotations

import fcntl
import ipaddress
import re
import socket
import struct

from farflung.errors import ConfigError

__all__ = [
    "LOOPBACK",
    "check_host",
    "explain_reachability",
    "find_interface_address",
    "find_local_address",
    "find_loopback_address",
    "format_tcp_address",
    "is_loopback",
    "parse_address",
]

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915


def is_loopback(address: str) -> bool:
    """Returns True if only this machine can reach ``address``.

    Raises:
      ConfigError: it is not an address, or stands for all of a machine's addresses.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        raise ConfigError(f"interface {address!r}: not an address") from None
    if parsed.is_unspecified:
        raise ConfigError(f"interface {address}: name one address, the one that the other machines reach")
    return parsed.is_loopback


def find_loopback_address() -> str:
    """Returns this machine's loopback address: ``::1`` if there is no IPv4."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((LOOPBACK, 0))
    except OSError:
        return "::1"
    return LOOPBACK


def find_interface_address(interface: str) -> str:
    """Returns the address that ``interface`` names: itself, or the IPv4 address of that network interface.

    Raises:
      ConfigError: it is neither an address nor a network interface with an IPv4 address.
    """
    try:
        return str(ipaddress.ip_address(interface))
    except ValueError:
        pass
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise ConfigError(
            f"--interface {interface}: neither an address nor a network interface here; those are: {', '.join(names)}"
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            raise ConfigError(
                f"--interface {interface}: has no IPv4 address; give an address instead"
            ) from None
    return socket.inet_ntoa(answer[20:24])


def check_host(host: str, option: str) -> None:
    """Checks that a host name resolves.

    Args:
      host: Name or address of the host.
      option: The user's option, for messages.

    Raises:
      ConfigError: the host is unknown.
    """
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a name of a host"
        raise ConfigError(f"{option}: unknown host ({reason})") from None


def parse_address(text: str) -> tuple[str, int]:
    """Returns host and port of ``HOST:PORT``, in which an IPv6 address is in brackets.

    Raises:
      ConfigError: it has another form.
    """
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:]+)):(\d{1,5})", text)
    if match is None or not 0 < int(match[3]) < 1 << 16:
        raise ConfigError(f"{text}: must be HOST:PORT, an address of IPv6 in brackets")
    return match[1] or match[2], int(match[3])


def find_local_address(host: str) -> str:
    """Returns this machine's address on the route to ``host``; sends nothing.

    Raises:
      ConfigError: the host is unknown, or there is no route to it.
    """
    check_host(host, f"MASTER_ADDR {host}")
    for family, kind, protocol, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(target)
            except OSError:
                continue
            address = str(probe.getsockname()[0])
            return find_loopback_address() if is_loopback(address) else address
    raise ConfigError(f"MASTER_ADDR {host}: no route to it; name this machine's address with --interface")


def explain_reachability() -> str:
    """Returns advice for errors where a machine that others connect to listens on loopback."""
    return (
        "set MASTER_ADDR (--master-addr) to an address of rank 0's machine that all machines reach, not to a name that "
        "/etc/hosts maps to 127.0.1.1 there, or give each machine its own --interface (Endpoint(interface=...))"
    )


def format_tcp_address(address: str) -> str:
    """Formats an address as peers publish it, without a port."""
    return f"tcp://[{address}]" if ":" in address else f"tcp://{address}"
