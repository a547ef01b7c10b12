"""At which port a replica listens, and by which address the others reach it."""

from __future__ import annotations

import ipaddress
import re
import socket

from farflung.comm.interface import tcp
from farflung.errors import ConfigError

__all__ = ["NO_WAY_IN", "advertised", "ports_in"]

NO_WAY_IN = "none"
"""What a replica advertises that nobody can connect to."""

_PORTS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
_HIGHEST = 65535


def ports_in(asked: str | int) -> range:
    """The ports in ``7000``, ``"7000"`` or ``"7000-7100"``; 0 stands for any that is free.

    Raises:
      ConfigError: it says something else.
    """
    found = _PORTS.fullmatch(str(asked))
    first = int(found[1]) if found else -1
    last = int(found[2]) if found and found[2] else first
    if not 0 <= first <= last <= _HIGHEST or (first == 0 < last):
        raise ConfigError(f"--port {asked}: must be a port or a range of them, such as 7000 or 7000-7100")
    return range(first, last + 1)


def advertised(asked: str, port: int) -> str:
    """The address in ``"HOST"``, ``"HOST:PORT"``, ``"[IPV6]"`` or ``"[IPV6]:PORT"``, as ZeroMQ writes it.

    Args:
      asked: what the others are to be told; a host's name is looked up here.
      port: where none is said.

    Raises:
      ConfigError: no such host, or it says something else.
    """
    found = re.fullmatch(r"\[([0-9A-Fa-f:.]+)\](?::(\d{1,5}))?|([^\[\]:]+)(?::(\d{1,5}))?", asked)
    if found is None or not 0 < int(found[2] or found[4] or port) <= _HIGHEST:
        raise ConfigError(
            f"--advertise {asked}: must be HOST or HOST:PORT, an address of IPv6 in brackets: [2001:db8::1]:7000, or "
            f"{NO_WAY_IN} where nobody can connect"
        )
    try:
        (*_, (host, *_)), *_ = socket.getaddrinfo(found[1] or found[3], None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--advertise {asked}: unknown host ({error.strerror})") from None
    if ipaddress.ip_address(host).is_unspecified:
        raise ConfigError(f"--advertise {asked}: name the address that the other machines reach")
    return f"{tcp(str(host))}:{found[2] or found[4] or port}"
