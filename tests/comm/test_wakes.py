"""A thread wakes once for what is certain to come, and as ever for what ends a connection in the middle of it."""

from __future__ import annotations

import itertools
import socket
import ssl
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflung.comm.connection import Connection
from farflung.comm.keys import Keys
from farflung.comm.pieces import TcpInfo
from farflung.comm.tls import TlsStream
from farflung.errors import DeadlinePassed, PeerLost
from farflung.tasks import Pending
from farflung.types import Payload
from tests.helpers import Group, number_in, numbered, same_bits, tag

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="other kernels do not say how long they are silent"
)

PIECE, SEGMENT = 1 << 16, 1448
DEADLINE_S = 10.0


class Dripping:
    """The socket of a connection over which no more bytes leave than are allowed."""

    def __init__(self, connection: Connection) -> None:
        self._sock, self.allowed_nbytes = connection.sock, 0
        connection.sock = self  # type: ignore[assignment]
        connection.pieces.read_tcp_info = lambda: TcpInfo(0.02, 0.0, "bbr", 10e6)  # type: ignore[method-assign]
        connection.pieces.record_sent = lambda nbytes: False  # type: ignore[method-assign]

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        if not self.allowed_nbytes:
            raise BlockingIOError
        sent = self._sock.send(b"".join(buffers)[: self.allowed_nbytes])
        self.allowed_nbytes -= sent
        return sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class Counted:
    """The socket of a connection, and how often it is read."""

    def __init__(self, connection: Connection) -> None:
        self._sock, self.reads = connection.sock, 0
        connection.sock = self  # type: ignore[assignment]

    def recv_into(self, buffer: memoryview) -> int:
        self.reads += 1
        return self._sock.recv_into(buffer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class Link:
    """Two members on unlike addresses, as of two machines, and a large message that drips from rank 0 to rank 1."""

    def __init__(self, members: Group) -> None:
        self.members = members.meet()
        self.sender = members.transports[0]._remotes[1].connections[0]
        self.receiver = members.transports[1]._remotes[0].connections[0]
        assert self.receiver.pieces.is_adaptive
        self.drip, self.counted = Dripping(self.sender), Counted(self.receiver)
        self.tensor = torch.rand(8 * PIECE // 4)

    def start(self) -> Pending[Payload]:
        arrived = self.members.comms[1].recv(0, tag(1))
        self.members.comms[0].send(Payload((self.tensor,)), 1, tag(1))
        return arrived

    def carry(self, nbytes: int) -> None:
        """Carries so many bytes, and lets both ends work after each segment."""
        for _ in range(-(-nbytes // SEGMENT)):
            self.drip.allowed_nbytes = SEGMENT
            for view in self.members.views:
                view.transport.poll(0.0)


@pytest.fixture(params=[False, True], ids=["plain", "sealed"])
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    keys = Keys.generate() if request.param else None
    about = {"needs_all_members": False}
    with closing(Group(2, keys=keys, interface="127.0.0.2", about=about)) as members:
        yield Link(members)


def test_a_piece_is_read_once_it_is_there(link: Link) -> None:
    arrived = link.start()
    link.carry(link.tensor.nbytes + 10_000)
    assert arrived.is_done
    assert same_bits(next(iter(arrived.result().iter_tensors())), link.tensor)
    assert link.counted.reads <= 4 * 8  # of 370 segments


def test_what_follows_a_piece_is_read_at_once(link: Link) -> None:
    arrived = link.start()
    link.carry(link.tensor.nbytes + 10_000)
    waiting = link.members.comms[1].recv(0, tag(2))
    link.members.comms[0].send(numbered(7), 1, tag(2))
    link.carry(SEGMENT)
    assert arrived.is_done
    assert number_in(waiting.result()) == 7


@given(st.lists(st.integers(0, 40) | st.just(16_401), max_size=8), st.lists(st.integers(0, 40), max_size=20))
def test_what_is_missing_of_a_record_is_known_wherever_the_stream_is_cut(
    sizes: list[int], cuts: list[int]
) -> None:
    stream = b"".join(b"\x17\x03\x03" + struct.pack(">H", size) + bytes(size) for size in sizes)
    ends = list(itertools.accumulate(size + 5 for size in sizes))
    begins = [0, *ends]
    tls, at = TlsStream(ssl.create_default_context(), is_server=False), 0
    for cut in (*cuts, len(stream)):
        tls.feed(memoryview(stream)[at : at + cut])
        at = min(len(stream), at + cut)
        number = next((n for n, end in enumerate(ends) if begins[n] <= at < end), len(ends))
        passed = at - begins[number]
        if passed == 0:
            assert tls.missing_nbytes == 0
        elif passed < 5:
            assert tls.missing_nbytes == 5 - passed
        else:
            assert tls.missing_nbytes == ends[number] - at


@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
def test_a_peer_that_dies_in_the_middle_of_a_piece_is_lost_at_once(link: Link, is_reset: bool) -> None:
    arrived = link.start()
    link.carry(PIECE // 2)
    if is_reset:
        link.drip.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.sender.end(None)
    link.members.until(lambda: arrived.is_done)
    assert isinstance(arrived.error, PeerLost)
    assert arrived.error.rank == 0


def test_bytes_that_the_kernel_holds_are_a_sign_of_life_and_their_end_is_silence(link: Link) -> None:
    view = link.members.views[1]
    arrived = link.start()
    link.carry(PIECE // 8)
    reads, before = link.counted.reads, view.transport.get_traffic(0)
    for quarter in range(12):
        link.carry(2 * SEGMENT)
        link.members.clock = quarter * DEADLINE_S / 4
        view.wait_monitor.check(DEADLINE_S)
    assert link.counted.reads <= reads + 2  # one of the TLS record that was under way
    assert view.transport.get_traffic(0).received_nbytes >= before.received_nbytes + 20 * SEGMENT
    assert not arrived.is_done
    heard_s = link.members.clock
    for quarter in range(1, 4):
        link.members.clock = heard_s + quarter * DEADLINE_S / 4
        view.wait_monitor.check(DEADLINE_S)
    assert not arrived.is_done
    link.members.clock = heard_s + DEADLINE_S
    view.wait_monitor.check(DEADLINE_S)
    assert isinstance(arrived.error, DeadlinePassed)
    assert arrived.error.rank == 0
    assert "nothing has arrived for 10.0 s" in str(arrived.error)


def test_a_link_that_was_cut_in_the_middle_of_a_piece_carries_on(link: Link) -> None:
    arrived = link.start()
    link.carry(PIECE // 2)
    for _ in range(100):
        for view in link.members.views:
            view.transport.poll(0.0)
    link.carry(link.tensor.nbytes + 10_000)
    assert same_bits(next(iter(arrived.result().iter_tensors())), link.tensor)


def test_what_is_withdrawn_in_the_middle_of_a_piece_holds_up_nothing(link: Link) -> None:
    link.start()
    link.carry(PIECE // 2)
    for comm in link.members.comms:
        comm.advance_view(1)
    waiting = link.members.comms[1].recv(0, tag(2))
    link.members.comms[0].send(numbered(7), 1, tag(2))
    link.carry(PIECE)
    assert number_in(waiting.result()) == 7
    assert link.members.transports[1].refusals.num_messages == 0


def test_what_is_damaged_behind_a_piece_ends_the_peer_by_name(link: Link) -> None:
    arrived = link.start()
    link.carry(link.tensor.nbytes + 10_000)
    assert arrived.is_done
    waiting = link.members.comms[1].recv(0, tag(2))
    link.sender._append_unsent(b"\xff" * 108)
    link.sender.flush()
    link.carry(SEGMENT)
    assert str(waiting.error).startswith("lost rank 0: refused 4,294,967,295 bytes from it: not a record")


def test_pieces_are_small_while_urgent_messages_are_expected(link: Link) -> None:
    link.start()
    link.carry(PIECE)
    assert link.sender.pieces.nbytes == PIECE
    urgent = link.members.comms[1].recv(0, tag(2))
    link.members.comms[0].send(numbered(7), 1, tag(2), priority=-1)
    link.carry(2 * PIECE)
    assert urgent.is_done
    assert link.sender.pieces.nbytes == 1 << 14
