"""Connections of real sockets: several to a peer, their end, forks, and what damaged records do to a live run."""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

import pytest
import torch

from farflung.comm import TcpTransport, connection, remote
from farflung.comm.connection import ConnectionState
from farflung.comm.keys import Keys
from farflung.comm.loop import EventLoop
from farflung.comm.pieces import TcpInfo
from farflung.errors import PeerLost
from farflung.types import Payload
from tests.comm.test_records import mutated
from tests.helpers import Group, number_in, numbered, same_bits, tag
from tests.strangers import CLIENT_HELLO, HELLO, knock, patiently

LARGE_NUMEL = 3_000_000


def links_of(members: Group, rank: int, peer: int) -> list[int]:
    return sorted(members.transports[rank]._remotes[peer].connections)


def test_what_is_due_at_once_waits_for_the_sockets() -> None:
    with closing(EventLoop()) as loop:
        calls = 0

        def again() -> None:
            nonlocal calls
            calls += 1
            assert calls < 10, "nothing else would be served"
            loop.call_later(0.0, again)

        again()
        loop.run_once(0.0)
        assert calls == 2


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
def test_more_tensors_than_the_kernel_takes_at_once_arrive(sealed: bool) -> None:
    with closing(Group(2, keys=Keys.generate() if sealed else None)) as members:
        members.meet()
        sent = Payload(tuple(Payload(tuple(torch.ones(100) for _ in range(50))) for _ in range(10)))
        arrived = [members.comms[1].recv(0, tag(number)) for number in range(4)]
        for number in range(4):
            members.comms[0].send(sent, 1, tag(number))
        members.until(lambda: all(one.is_done for one in arrived))
        assert [len(list(one.result().iter_tensors())) for one in arrived] == [500] * 4


def test_a_connection_that_sends_no_longer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although its socket is whole."""
    monkeypatch.setattr(connection, "BROKEN_CLOSE_S", 0.0)
    with closing(Group(2)) as members:
        members.meet()
        (link,) = members.transports[0]._remotes[1].connections.values()
        monkeypatch.setattr(link, "sock", Unable(link.sock))
        waiting = members.comms[1].recv(0, tag())
        members.comms[0].send(numbered(1), 1, tag())
        members.until(lambda: waiting.is_done)
        assert isinstance(waiting.error, PeerLost)


class Unable:
    """A socket whose kernel has no memory for what is sent."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def sendmsg(self, buffers: object) -> int:
        raise OSError(errno.ENOBUFS, "No buffer space available")


# --- several connections ----------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["plain", "sealed"])
def several(request: pytest.FixtureRequest) -> Iterator[Group]:
    keys = Keys.generate() if request.param else None
    with closing(Group(3, keys=keys, connections=3)) as members:
        members.meet()
        members.until(
            lambda: all(links_of(members, a, b) == [0, 1, 2] for a in range(3) for b in range(3) if a != b)
        )
        yield members


def test_large_messages_share_all_connections_and_arrive_as_they_are(several: Group) -> None:
    generator = torch.Generator().manual_seed(1)
    sent = [torch.rand(LARGE_NUMEL, generator=generator) for _ in range(3)]
    arrived = [several.comms[0].recv(1, tag(number)) for number in range(3)]
    for number, tensor in enumerate(sent):
        several.comms[1].send(Payload((tensor, torch.ones(2))), 0, tag(number))
    several.until(lambda: all(one.is_done for one in arrived))
    for tensor, one in zip(sent, arrived, strict=True):
        came, beside = one.result().iter_tensors()
        assert same_bits(came, tensor)
        assert same_bits(beside, torch.ones(2))
    assert [transport.refusals.num_connections for transport in several.transports] == [0, 0, 0]


def test_a_tensor_arrives_in_the_memory_that_is_named_for_it(several: Group) -> None:
    tensor, room, short = torch.rand(LARGE_NUMEL), torch.zeros(LARGE_NUMEL), torch.zeros(LARGE_NUMEL - 1)
    for number, into in enumerate((room, short, torch.zeros(LARGE_NUMEL, 2)[:, 0])):
        several.comms[0].post_recv_buffer(1, tag(number), into)
        several.comms[1].send(Payload((tensor, torch.ones(2))), 0, tag(number))
        arrived = several.comms[0].recv(1, tag(number))
        several.until(lambda arrived=arrived: arrived.is_done)  # type: ignore[misc]
        came, beside = arrived.result().iter_tensors()
        assert same_bits(came, tensor)
        assert same_bits(beside, torch.ones(2))
        assert (came.data_ptr() == into.data_ptr()) == (into is room)
    assert not several.comms[0].session.mailbox._recv_buffers
    assert not short.any()


def test_one_of_several_that_breaks_loses_the_peer(several: Group) -> None:
    waiting = several.comms[0].recv(1, tag(5))
    several.transports[1]._remotes[0].connections[2].sock.shutdown(socket.SHUT_RDWR)
    several.until(lambda: waiting.is_done)
    assert isinstance(waiting.error, PeerLost)
    assert waiting.error.rank == 1


def test_all_that_was_sent_before_the_end_of_several_arrives(several: Group) -> None:
    waiting = several.comms[0].recv(1, tag(5))
    several.comms[1].send(Payload((torch.full((LARGE_NUMEL,), 7.0),)), 0, tag(5))
    several.comms[1].send(numbered(1), 0, tag(6))
    several.until(lambda: not several.transports[1].queued_nbytes)
    patiently(lambda: several.leave(1), lambda: several.transports[0].poll(0.001))
    several.until(lambda: several.views[0].members.by_rank[1].is_gone)
    assert float(next(iter(waiting.result().iter_tensors()))[-1]) == 7.0
    assert number_in(several.comms[0].recv(1, tag(6)).result()) == 1


def test_the_larger_number_counts() -> None:
    with closing(Group(0)) as members:
        transports = [TcpTransport(0, 2, connections=4), TcpTransport(1, 2, connections=2)]
        members.take(transports, [{}, {}])
        members.meet()
        members.until(lambda: links_of(members, 0, 1) == links_of(members, 1, 0) == [0, 1, 2, 3])
        members.exchange(1)


@pytest.mark.parametrize("dialler", [0, 1])
def test_more_are_made_as_long_as_each_doubling_helps(dialler: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round trip, loss and rates are made up: 2 Mbit/s for each connection, and 9 Mbit/s for all."""
    with closing(Group(2)) as members:
        members.meet()
        transport = members.transports[dialler]
        member = transport._remotes[1 - dialler]
        link = member.connections[0]
        monkeypatch.setattr(link.pieces, "read_tcp_info", lambda: TcpInfo(0.15, 0.02, "reno", 2e6))
        for _ in range(6):
            link.pieces.busy_s += remote.MEASURE_BUSY_S
            rate = min(2e6 * len(member.connections), 9e6)
            for one in member.connections.values():
                one.pieces.busy_nbytes += int(rate * remote.MEASURE_BUSY_S / 8 / len(member.connections))
            member.handle_busy(link)
            wanted = member.num_wanted
            members.until(lambda wanted=wanted: len(member.connections) == wanted)  # type: ignore[misc]
        assert member._has_enough_connections
        assert member.num_wanted == 8
        members.exchange(1)


def test_within_a_machine_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Group(2)) as members:
        members.meet()
        member = members.transports[0]._remotes[1]
        link = member.connections[0]
        link.pieces.busy_s, link.pieces.busy_nbytes = 100.0, 1 << 30
        member.handle_busy(link)
        assert member.num_wanted == 1


# --- pieces -----------------------------------------------------------------------------------------------------


class Watched:
    """A socket, and how many bytes each call has handed to it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self.handed = sock, list[int]()

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        self.handed.append(sum(map(len, buffers)))
        return self._sock.sendmsg(buffers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def test_the_kernel_takes_the_records_of_a_sealed_piece_at_once() -> None:
    with closing(Group(2, keys=Keys.generate())) as members:
        members.meet()
        link = members.transports[0]._remotes[1].connections[0]
        link.sock = watched = Watched(link.sock)  # type: ignore[assignment]
        arrived = members.comms[1].recv(0, tag(5))
        members.comms[0].send(Payload((torch.rand(40_000),)), 1, tag(5))
        members.until(lambda: arrived.is_done)
        assert max(watched.handed) > 160_000  # ten records of TLS


@pytest.mark.parametrize(("rate_bps", "piece"), [(0.0, 1 << 14), (80e6, 100_000), (1e9, 1 << 18)])
def test_a_piece_is_what_the_kernel_has_seen_a_link_carry(
    rate_bps: float, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Group(2, keys=Keys.generate())) as members:
        members.meet()
        link = members.transports[0]._remotes[1].connections[0]
        monkeypatch.setattr(link.pieces, "read_tcp_info", lambda: TcpInfo(0.15, 0.0, "bbr", rate_bps))
        monkeypatch.setattr(link.pieces, "record_sent", lambda nbytes: False)
        link.pieces.is_adaptive, link.pieces.nbytes = True, 1 << 14
        arrived = members.comms[1].recv(0, tag(5))
        members.comms[0].send(Payload((torch.rand(LARGE_NUMEL),)), 1, tag(5))
        members.until(lambda: arrived.is_done)
        assert link.pieces.nbytes == piece


def test_the_rate_is_read_where_the_kernel_has_it() -> None:
    """On loopback, of some megabytes."""
    with closing(Group(2)) as members:
        members.meet()
        arrived = members.comms[1].recv(0, tag(5))
        members.comms[0].send(Payload((torch.rand(LARGE_NUMEL),)), 1, tag(5))
        members.until(lambda: arrived.is_done)
        path = members.transports[0]._remotes[1].connections[0].pieces.read_tcp_info()
        if path is None:
            pytest.skip("only Linux tells")
        assert 1e6 < path.rate_bps < 1e13


# --- the end ----------------------------------------------------------------------------------------------------

RUNS = 1000


def test_what_was_said_before_the_end_arrives_however_the_ends_meet() -> None:
    """Both ends are busy; one closes at a random moment, with bytes unread at both."""
    draw = random.Random(4)
    for number in range(RUNS // 10):
        with closing(Group(2, about={"needs_all_members": False})) as members:
            members.meet()
            one, other = members.comms
            for _ in range(draw.randrange(4)):
                one.send(
                    Payload((torch.zeros(draw.randrange(1, 100_000)),)), 1, tag(1, draw.randrange(1 << 20))
                )
                other.send(
                    Payload((torch.zeros(draw.randrange(1, 100_000)),)), 0, tag(2, draw.randrange(1 << 20))
                )
                for view in members.views[: draw.randrange(3)]:
                    view.transport.poll(0)
            last = other.recv(0, tag(9))
            one.send(numbered(number), 1, tag(9))
            patiently(lambda: members.leave(0), lambda: members.transports[1].poll(0.001))
            members.until(lambda: members.views[1].members.by_rank[0].is_gone)
            assert number_in(last.result()) == number
            assert members.views[1].mailbox.ended.error is None


@pytest.mark.slow
def test_a_thousand_ends() -> None:
    for _ in range(RUNS // 100):
        test_what_was_said_before_the_end_arrives_however_the_ends_meet()


def test_a_child_closes_what_it_has_inherited() -> None:
    """The connections of a process end with it, whatever it has forked."""
    reads, writes = os.pipe()
    with closing(Group(2)) as members:
        members.meet()
        waiting = members.comms[0].recv(1, tag(5))
        child = os.fork()
        if child == 0:
            os.close(writes)
            os.read(reads, 1)
            os._exit(0)
        members.close(members.views[1])
        members.until(lambda: waiting.is_done)
        assert str(waiting.error) == "lost rank 1: its connection was closed from its end"
    os.close(writes)
    os.close(reads)
    os.waitpid(child, 0)


def test_settled_is_what_the_other_kernel_has() -> None:
    with closing(Group(2)) as members:
        members.meet()
        link = members.transports[0]._remotes[1].connections[0]
        members.comms[0].send(Payload((torch.zeros(20_000_000),)), 1, tag(1))
        members.until(lambda: link.count_undelivered_nbytes() > 0)
        arrived = members.comms[1].recv(0, tag(1))
        members.until(lambda: arrived.is_done)
        members.until(lambda: not link.count_undelivered_nbytes())
        assert link.state is ConnectionState.AUTHENTICATED


# --- damaged records --------------------------------------------------------------------------------------------


def sums(members: Group, between: int, seed: int) -> list[torch.Tensor]:
    """What rank 0 has summed of rank 1's; ``between`` two of them strangers say damaged things to it."""
    draw, total, found = random.Random(seed), torch.zeros(5000), list[torch.Tensor]()
    transport = members.transports[0]
    for number in range(50):
        for _ in range(between):
            transport.handshaker.num_expected = 1  # as if a member were to come
            transport.handshaker.update_accepting()
            said = [mutated(draw), bytes(HELLO.size) + mutated(draw), CLIENT_HELLO + mutated(draw)]
            with knock(members.comms[0]) as stranger, suppress(OSError):
                stranger.sendall(draw.choice(said)[: 1 << 16])
            transport.poll(0)
        transport.set_expected(0)
        tensor = torch.rand(5000, generator=torch.Generator().manual_seed(number))
        members.comms[1].send(Payload((tensor,)), 0, tag(number))
        arrived = members.comms[0].recv(1, tag(number))
        members.until(lambda arrived=arrived: arrived.is_done)  # type: ignore[misc]
        (came,) = arrived.result().iter_tensors()
        total = total + came
        found.append(total)
    return found


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
def test_strangers_with_damaged_records_are_refused_and_a_run_ends_with_the_same_bits(
    sealed: bool, count: int
) -> None:
    keys = Keys.generate() if sealed else None
    with closing(Group(2)) as alone, closing(Group(2, keys=keys)) as members:
        expected = sums(alone.meet(), 0, 1)
        found = sums(members.meet(), count // 50, 1)
        members.transports[0].set_expected(1)
        members.until(lambda: members.transports[0].refusals.num_connections == count)
        assert members.transports[0].refusals.num_messages == 0
        assert members.views[0].mailbox.ended.error is None
    assert all(map(same_bits, found, expected))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
def test_a_damaged_record_of_a_member_ends_it_by_name_at_once(sealed: bool, whole: bool) -> None:
    draw = random.Random(5)
    for _ in range(20):
        with closing(
            Group(3, keys=Keys.generate() if sealed else None, about={"needs_all_members": whole})
        ) as members:
            members.meet()
            waiting = members.comms[0].recv(1, tag(5))
            link = members.transports[1]._remotes[0].connections[0]
            link._append_unsent(b"\xff" * 8 + draw.randbytes(100))
            link.flush()
            members.until(lambda: waiting.is_done)  # noqa: B023
            assert isinstance(waiting.error, PeerLost)
            assert str(waiting.error).startswith(
                "lost rank 1: refused 4,294,967,295 bytes from it: not a record"
            )
            assert members.transports[0].refusals.num_messages == 1
            assert (members.views[0].mailbox.ended.error is None) is not whole
            if not whole:
                members.exchange(7, 0, 2)
