"""Endpoint of a process: where it listens, its advertised address, and its keys."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from farflung.comm.interface import (
    find_interface_address,
    find_loopback_address,
    format_tcp_address,
    is_loopback,
)
from farflung.comm.keys import Keys, load_keys
from farflung.errors import ConfigError
from farflung.options import MAX_CONNECTIONS

__all__ = ["UNREACHABLE", "Endpoint", "parse_advertised", "parse_ports"]

UNREACHABLE = "none"
"""Advertised by a replica to which no peer can connect."""

_PORTS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Connection settings of a process.

    Args:
      interface: Address, or name of the network interface, to listen on; when not given, the one on the route
        to the master address, or to the coordinator of coded training.
      port: Port to listen on, or a range such as 7000-7100 of which each replica of a machine takes one, for
        firewalls; when not given, any free one.
      advertise: HOST or HOST:PORT by which peers reach this process, if that differs from its listening
        address: behind port forwarding, in a container. none if no peer can connect to it, as behind a home
        router: it connects to its peers, and a reachable one relays between two that are not.
      keys: Folder made by farflung keys, with this machine's secret key and the public keys of all; everything
        is then encrypted. When not given, keys are made for the run and exchanged through its store, or its
        coordinator, so any machine that reaches it can take part.
      encrypt: True to encrypt messages within this machine too, to measure the cost; those between machines always are.
      connections: Number of connections that large messages to each peer share, 1 to 64: several are faster if
        packets are lost or the round trip is long. When not given, as many as help, by measurement; of two
        peers the larger number counts.

    Raises:
      ConfigError: there is a port although the process does not listen, or the number of connections is out of range.
    """

    interface: str | None = None
    port: str | int | None = None
    advertise: str | None = None
    keys: Path | str | None = None
    encrypt: bool = False
    connections: int | None = None

    def __post_init__(self) -> None:
        if self.advertise == UNREACHABLE and self.port is not None:
            raise ConfigError(
                f"--advertise {UNREACHABLE}: no peer connects to this replica, so it listens at no port: leave out "
                f"--port {self.port}, or name the address at which it is reached"
            )
        if self.connections is not None and not 1 <= self.connections <= MAX_CONNECTIONS:
            raise ConfigError(f"--connections {self.connections}: must be from 1 to {MAX_CONNECTIONS}")

    @property
    def address(self) -> str:
        """Address of the interface; loopback when not given.

        Raises:
          ConfigError: there is no such interface.
        """
        return find_interface_address(self.interface or find_loopback_address())

    @property
    def is_local(self) -> bool:
        """Returns True if all peers are on this machine."""
        return is_loopback(self.address) and self.advertise in (None, UNREACHABLE)

    @property
    def needs_encryption(self) -> bool:
        """Returns True if messages are encrypted."""
        return self.keys is not None or self.encrypt or not self.is_local

    @property
    def ports(self) -> range:
        """Candidate ports to listen on.

        Raises:
          ConfigError: they cannot be parsed.
        """
        return parse_ports(0 if self.port is None else self.port)

    def resolve_interface(self, find_address: Callable[[], str]) -> Endpoint:
        """Resolves the interface by ``find_address`` if none is given; returns the endpoint."""
        return self if self.interface else replace(self, interface=find_address())

    def read_keys(self) -> Keys | None:
        """Reads the folder of keys.

        Raises:
          ConfigError: it cannot be used.
        """
        return None if self.keys is None else load_keys(Path(self.keys))

    def get_keys(self) -> Keys | None:
        """Returns the keys of this process, new ones if there is no folder; None if it does not encrypt.

        Raises:
          ConfigError: the folder of keys cannot be used.
        """
        return self.read_keys() or (Keys.generate() if self.needs_encryption else None)


def parse_ports(text: str | int) -> range:
    """Parses ``7000``, ``"7000"`` or ``"7000-7100"`` as ports; 0 is any free port.

    Raises:
      ConfigError: it is malformed.
    """
    match = _PORTS.fullmatch(str(text))
    first = int(match[1]) if match else -1
    last = int(match[2]) if match and match[2] else first
    if not 0 <= first <= last <= _MAX_PORT or (first == 0 < last):
        raise ConfigError(f"--port {text}: must be a port or a range of them, such as 7000 or 7000-7100")
    return range(first, last + 1)


def parse_advertised(text: str, port: int) -> str:
    """Parses ``"HOST"``, ``"HOST:PORT"``, ``"[IPV6]"`` or ``"[IPV6]:PORT"`` as a published address.

    Args:
      text: Advertised address; the name of a host is resolved here.
      port: Default port.

    Raises:
      ConfigError: the host is unknown, or the text is malformed.
    """
    match = re.fullmatch(r"\[([0-9A-Fa-f:.]+)\](?::(\d{1,5}))?|([^\[\]:]+)(?::(\d{1,5}))?", text)
    if match is None or not 0 < int(match[2] or match[4] or port) <= _MAX_PORT:
        raise ConfigError(
            f"--advertise {text}: must be HOST or HOST:PORT, an address of IPv6 in brackets: [2001:db8::1]:7000, or "
            f"{UNREACHABLE} where no peer can connect"
        )
    try:
        (*_, (host, *_)), *_ = socket.getaddrinfo(match[1] or match[3], None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--advertise {text}: unknown host ({error.strerror})") from None
    if ipaddress.ip_address(host).is_unspecified:
        raise ConfigError(f"--advertise {text}: name the address that the other machines reach")
    return f"{format_tcp_address(str(host))}:{match[2] or match[4] or port}"
