"""One node's part of one_flow.py: node 0 sends messages of one connection after another, node 1 receives them."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time

PORT = 4000
PATIENCE_S = 60.0
_SIZE, _TIME = struct.Struct("!Q"), struct.Struct("!d")


def main() -> None:
    """``worker plans``, a JSON list of ``[congestion control, bytes, seconds of rest before each message]``."""
    plans = json.loads(sys.argv[1])
    if os.environ["RANK"] == "0":
        for control, nbytes, rests in plans:
            with _connected(sys.argv[2], control) as link:
                print(
                    json.dumps({"control": control, "nbytes": nbytes, **_sent(link, nbytes, rests)}),
                    flush=True,
                )
    else:
        with socket.create_server((sys.argv[2], PORT)) as server:
            server.settimeout(PATIENCE_S)
            for _, _, rests in plans:
                link, _ = server.accept()
                with link:
                    link.settimeout(PATIENCE_S)
                    for _ in rests:
                        _received(link)


def _connected(address: str, control: str) -> socket.socket:
    """A connection that never had another control: one that began with BBR would be paced under any."""
    until = time.monotonic() + PATIENCE_S
    while True:
        link = socket.socket()
        link.settimeout(PATIENCE_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            link.connect((address, PORT))
        except ConnectionRefusedError:
            link.close()
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            return link


def _sent(link: socket.socket, nbytes: int, rests: list[float]) -> dict[str, list[float]]:
    """When each message set out, after the first, and what it took until its last byte was there."""
    begins, seconds, payload = [], [], bytes(nbytes)
    for rest_s in rests:
        time.sleep(rest_s)
        begin = time.monotonic()
        link.sendall(_SIZE.pack(nbytes) + payload)
        (arrived,) = _TIME.unpack(_whole(link, _TIME.size))
        begins.append(begin)
        seconds.append(arrived - begin)
    return {
        "begins_s": [round(begin - begins[0], 6) for begin in begins],
        "seconds": [round(took, 6) for took in seconds],
    }


def _received(link: socket.socket) -> None:
    (nbytes,) = _SIZE.unpack(_whole(link, _SIZE.size))
    _whole(link, nbytes)
    link.sendall(_TIME.pack(time.monotonic()))


def _whole(link: socket.socket, nbytes: int) -> bytearray:
    taken, view = 0, memoryview(buffer := bytearray(nbytes))
    while taken < nbytes:
        count = link.recv_into(view[taken:])
        if not count:
            raise ConnectionError("the other end is gone")
        taken += count
    return buffer


if __name__ == "__main__":
    main()
