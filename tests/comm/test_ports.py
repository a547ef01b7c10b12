"""Where a replica listens, and by which address the others reach it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from farflung.comm import TcpTransport
from farflung.comm.endpoint import parse_advertised, parse_ports
from farflung.errors import ConfigError
from tests.helpers import Group


@pytest.mark.parametrize(
    ("asked", "ports"), [(0, [0]), ("7000", [7000]), (7000, [7000]), ("7000-7002", [7000, 7001, 7002])]
)
def test_ports(asked: str | int, ports: list[int]) -> None:
    assert list(parse_ports(asked)) == ports


@pytest.mark.parametrize(
    "asked", ["", "-1", "many", "7000-", "7002-7000", "65536", "0-5", "7000,7001", "7 000"]
)
def test_what_is_no_port(asked: str) -> None:
    with pytest.raises(
        ConfigError, match=r"--port .*: must be a port or a range of them, such as 7000 or 7000-7100"
    ):
        parse_ports(asked)


@pytest.mark.parametrize(
    ("asked", "address"),
    [
        ("192.0.2.7", "tcp://192.0.2.7:7000"),
        ("192.0.2.7:80", "tcp://192.0.2.7:80"),
        ("[2001:db8::7]", "tcp://[2001:db8::7]:7000"),
        ("[2001:db8::7]:80", "tcp://[2001:db8::7]:80"),
    ],
)
def test_what_is_advertised(asked: str, address: str) -> None:
    assert parse_advertised(asked, 7000) == address


@pytest.mark.parametrize(
    "asked", ["", ":80", "2001:db8::7", "host:port", "192.0.2.7:0", "192.0.2.7:70000", "[::1"]
)
def test_what_cannot_be_advertised(asked: str) -> None:
    with pytest.raises(ConfigError, match=r"--advertise .*: must be HOST or HOST:PORT"):
        parse_advertised(asked, 7000)


def test_what_nobody_reaches_is_not_advertised() -> None:
    with pytest.raises(ConfigError, match="name the address that the other machines reach"):
        parse_advertised("0.0.0.0", 7000)
    with pytest.raises(ConfigError, match="unknown host"):
        parse_advertised("no.such.host.invalid", 7000)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


def test_the_first_port_that_is_free_is_taken(taken: int) -> None:
    members = Group(2, ports=(taken, 0)).meet()
    assert all(
        not comm.session.transport.local_peer.address_text.endswith(f":{taken}") for comm in members.comms
    )
    members.exchange(3)
    members.close()


def test_no_free_port(taken: int) -> None:
    with pytest.raises(
        ConfigError, match=f"interface 127.0.0.1: port {taken} in use: give others with --port"
    ):
        TcpTransport(0, 2, ports=(taken,))


@contextlib.contextmanager
def forwarded(to: list[int]) -> Iterator[int]:
    """A port that is forwarded to the one in a list, as a home's router does."""

    def pump(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := one.recv(1 << 16):
                other.sendall(piece)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def forward() -> None:
        with contextlib.suppress(OSError):
            while True:
                inner, _ = listener.accept()
                outer = socket.create_connection(("127.0.0.1", to[0]))
                ends.extend((inner, outer))
                for pair in ((inner, outer), (outer, inner)):
                    pumps.append(threading.Thread(target=pump, args=pair))
                    pumps[-1].start()

    ends: list[socket.socket] = []
    pumps: list[threading.Thread] = []
    listener = socket.create_server(("127.0.0.1", 0))
    router = threading.Thread(target=forward)
    router.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        router.join()
        for thread in pumps:
            thread.join()
        for end in ends:
            end.close()


def test_a_replica_is_reached_through_a_forwarded_port() -> None:
    behind: list[int] = []
    with forwarded(behind) as port:
        members = Group(2, advertise=f"127.0.0.1:{port}")
        assert members.comms[0].session.transport.local_peer.address == f"tcp://127.0.0.1:{port}"
        door = members.transports[0].handshaker.server_socket
        assert door is not None
        behind.append(door.getsockname()[1])
        members.meet()
        members.exchange(3)
        members.close()
