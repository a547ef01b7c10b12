"""What a process listens on, as ``ss -tlnp`` shows it."""

from __future__ import annotations

import ipaddress
from pathlib import Path

_LISTEN = "0A"


def listening(pid: int | str = "self") -> set[tuple[str, int]]:
    """Addresses and ports of all its listening TCP sockets."""
    folder = Path("/proc", str(pid))
    sockets = set()
    for descriptor in (folder / "fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            sockets.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in (folder / "net" / table).read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in sockets:
                address, port = fields[1].split(":")
                words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
                found.add((str(ipaddress.ip_address(b"".join(words))), int(port, 16)))
    return found
