"""Visitors of a member: those that know the run's key are answered, and nothing else is asked of it."""

from __future__ import annotations

import itertools
import random
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from farflung.comm import Listener, TcpTransport
from farflung.comm.keys import Keys, build_tls_context
from farflung.comm.peer import VISITOR_RANK
from farflung.comm.visits import LENGTH, MAX_NBYTES, Access, compute_visit_proof
from tests.helpers import PATIENCE_S
from tests.strangers import (
    HELLO,
    NOISE,
    PROOF_NBYTES,
    Clock,
    challenged,
    exactly,
    may_be_closed,
    until_closed,
)

KEY = bytes(range(32))
COUNT = 10_000


class Member:
    """A member that is alone and answers visitors, on a thread of its own."""

    def __init__(self, *, encrypted: bool = False) -> None:
        keys = Keys.generate() if encrypted else None
        self.transport = TcpTransport(0, 1, keys=keys)
        self.place = self.transport.local_peer.address_text.removeprefix("tcp://")
        self.access = Access(KEY, encrypted, [self.place])
        self.asked: list[bytes] = []
        self.transport.connect_peers([])
        self.transport.listener = cast("Listener", object())
        self.transport.set_expected(0)
        self.transport.accept_visits(KEY, self._answer)
        self._ends = False
        self._bell, ear = socket.socketpair()
        self._ear = ear
        self.transport.loop.watch(ear.fileno(), readable=lambda: None)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _answer(self, said: bytes) -> bytes:
        self.asked.append(said)
        return b'{"so": %d}' % len(self.asked)

    def _run(self) -> None:
        while not self._ends:
            self.transport.poll(PATIENCE_S)
        self.transport.close()

    def close(self) -> None:
        if not self._ends:
            self._ends = True
            self._bell.send(b"!")
            self._thread.join()
            self._bell.close()
            self._ear.close()

    def knock(self) -> socket.socket:
        host, _, port = self.place.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Member]]:
    """Makes members whose clocks stand still: who is refused is so at once."""
    Clock(monkeypatch)
    made: list[Member] = []

    def make(**options: Any) -> Member:
        made.append(Member(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_visitor_is_answered(encrypted: bool, member: Callable[..., Member]) -> None:
    one = member(encrypted=encrypted)
    for number in (1, 2):
        assert one.access.ask(one.place, {"what": "a" * 100_000}, PATIENCE_S) == {"so": number}
    assert len(one.asked[0]) > 100_000
    assert one.transport.refusals.num_connections == 0


@pytest.mark.parametrize("encrypted", [False, True])
def test_another_key_is_refused(encrypted: bool, member: Callable[..., Member]) -> None:
    one = member(encrypted=encrypted)
    with pytest.raises(ConnectionError):
        Access(bytes(32), encrypted, []).ask(one.place, {}, PATIENCE_S)
    assert one.access.ask(one.place, {}, PATIENCE_S) == {"so": 1}
    one.close()
    assert one.transport.refusals.num_connections == 1


def test_a_member_of_another_run_is_told_nothing(member: Callable[..., Member]) -> None:
    """One that lets all visitors in, without the key."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        said: list[bytes] = []

        def serve() -> None:
            link, _ = door.accept()
            with link:
                link.sendall(struct.pack("<2sBx16s", b"FF", 5, bytes(16)))
                exactly(link, HELLO.size)
                link.sendall(bytes(PROOF_NBYTES))
                said.append(link.recv(1))

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ConnectionError, match="another run"):
            Access(KEY, False, []).ask(f"127.0.0.1:{door.getsockname()[1]}", {}, PATIENCE_S)
        thread.join()
        assert said == [b""]


def test_what_listens_in_between_is_refused(member: Callable[..., Member]) -> None:
    """It hands on between two connections with TLS all that it hears; the proofs are for another certificate."""
    one, own = member(encrypted=True), Keys.generate()
    with socket.create_server(("127.0.0.1", 0)) as door:

        def serve() -> None:
            link, _ = door.accept()
            outside = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            outside.check_hostname, outside.verify_mode = False, ssl.CERT_NONE
            near_side = build_tls_context(own, [], is_server=True)
            near_side.verify_mode = ssl.CERT_NONE
            with (
                may_be_closed(),
                near_side.wrap_socket(link, server_side=True) as near,
                outside.wrap_socket(one.knock()) as far,
            ):
                for one_end, other in itertools.cycle([(far, near), (near, far)]):
                    said = one_end.recv(1 << 16)
                    if not said:
                        return
                    other.sendall(said)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(OSError):  # noqa: PT011 (however the connection ends)
            one.access.ask(f"127.0.0.1:{door.getsockname()[1]}", {"a": 1}, PATIENCE_S)
        thread.join()
    assert not one.asked
    one.close()
    assert one.transport.refusals.num_connections == 1


def introduced(link: socket.socket, proof: bytes | None = None) -> None:
    """Introduces a visitor, with the right proof when none is given."""
    nonces = challenged(link) + bytes(16)
    link.sendall(
        HELLO.pack(VISITOR_RANK, 0, bytes(16), proof or compute_visit_proof(KEY, "visitor", nonces, None))
    )
    if proof is None:
        assert exactly(link, PROOF_NBYTES) == compute_visit_proof(KEY, "member", nonces, None)


def test_a_proof_is_of_one_connection_and_of_one_end(member: Callable[..., Member]) -> None:
    one = member()
    with one.knock() as first, one.knock() as second:
        nonces = challenged(first) + bytes(16)
        introduced(second, compute_visit_proof(KEY, "visitor", nonces, None))
        until_closed(second)
        first.sendall(
            HELLO.pack(VISITOR_RANK, 0, bytes(16), compute_visit_proof(KEY, "member", nonces, None))
        )
        until_closed(first)
    one.close()
    assert one.transport.refusals.num_connections == 2


@pytest.mark.parametrize("nbytes", [0, MAX_NBYTES + 1, 0xFFFFFFFF])
def test_a_question_is_of_bounded_length(nbytes: int, member: Callable[..., Member]) -> None:
    one = member()
    with one.knock() as link:
        introduced(link)
        link.sendall(LENGTH.pack(nbytes))
        until_closed(link)
    one.close()
    assert one.transport.refusals.num_connections == 1
    assert not one.asked


def test_the_longest_question_is_answered(member: Callable[..., Member]) -> None:
    one = member()
    with one.knock() as link:
        introduced(link)
        link.sendall(LENGTH.pack(MAX_NBYTES) + bytes(MAX_NBYTES))
        assert exactly(link, LENGTH.size + 9)[LENGTH.size :] == b'{"so": 1}'
    assert [len(said) for said in one.asked] == [MAX_NBYTES]


def test_half_a_question_is_not_answered(member: Callable[..., Member]) -> None:
    one = member()
    with one.knock() as link:
        introduced(link)
        link.sendall(LENGTH.pack(10) + b"half")
        link.shutdown(socket.SHUT_WR)
        until_closed(link)
    assert not one.asked


@pytest.mark.parametrize("count", [200, pytest.param(COUNT, marks=pytest.mark.slow)])
def test_strangers_are_refused(count: int, member: Callable[..., Member]) -> None:
    """Noise, and introductions with some bits changed: none is let in, and a visitor beside them is answered."""
    one, draw = member(), random.Random(0)
    for number in range(count):
        with one.knock() as link, may_be_closed():
            if draw.random() < 0.3:
                link.sendall(draw.choice([*NOISE.values(), draw.randbytes(draw.randrange(1, 200))]))
                link.shutdown(socket.SHUT_WR)
            else:
                nonces = challenged(link) + bytes(16)
                hello = bytearray(
                    HELLO.pack(VISITOR_RANK, 0, bytes(16), compute_visit_proof(KEY, "visitor", nonces, None))
                )
                at = draw.choice([*range(4), *range(8, HELLO.size)])
                hello[at] ^= 1 << draw.randrange(8)
                link.sendall(bytes(hello) + LENGTH.pack(2) + b"{}")
            until_closed(link)
        if number % 100 == 50:
            one.access.ask(one.place, {}, PATIENCE_S)
    assert len(one.asked) == count // 100
    one.close()
    assert one.transport.refusals.num_connections == count
