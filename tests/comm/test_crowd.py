"""Strangers in great numbers, and with much to say."""

from __future__ import annotations

import errno
import gc
import os
import resource
import socket
import ssl
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest

from farflung.comm import TcpTransport, connection, handshake
from farflung.comm.keys import Keys, build_tls_context
from farflung.comm.tls import TlsStream
from farflung.errors import ConfigError
from tests.crowded import LIMIT, descriptors, hopeless_scenario, late_scenario, resident_nbytes, scenario
from tests.forks import Fork
from tests.helpers import Group
from tests.strangers import CLIENT_HELLO, FRAME, Clock, knock, patiently


def test_a_crowd_takes_no_descriptors_where_there_may_be_more() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, before[1]))
    try:
        scenario()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(before[1], 1 << 16)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_crowd_takes_no_descriptors_where_there_are_no_more() -> None:
    with Fork(hopeless_scenario) as process:
        _, err = process.finished()
    assert process.returncode == 0, "\n".join(err)


def test_a_newcomer_gets_in_among_a_crowd_endless_frames_and_forged_ones() -> None:
    with Fork(late_scenario) as process:
        _, err = process.finished()
    assert process.returncode == 0, "\n".join(err)


class Knocked:
    """A rank that waits for another one, with strangers at its door, on a clock set by hand."""

    def __init__(self, count: int, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock(monkeypatch)
        self.members = stack.enter_context(closing(Group(2)))
        self.members.comms[0].session.members.connect(self.members.peers)
        self.transport = self.members.transports[0]
        self.links = [stack.enter_context(knock(self.members.comms[0])) for _ in range(count)]
        self.turn()

    def turn(self, passed_s: float = 0.0) -> None:
        """Has it do all that there is to do after so many seconds."""
        self.clock.now_s += passed_s
        for _ in range(20):
            self.transport.poll(0.0)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def test_only_so_many_strangers_are_accepted_at_once(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Knocked(handshake.MAX_UNAUTHENTICATED + 20, stack, monkeypatch)
    assert len(one.transport.handshaker.unauthenticated) == handshake.MAX_UNAUTHENTICATED + 1, (
        "and the member that is due"
    )
    for link in one.links[:5]:
        link.shutdown(socket.SHUT_WR)
    one.turn()
    assert one.transport.refusals.num_connections == 5
    assert len(one.transport.handshaker.unauthenticated) == handshake.MAX_UNAUTHENTICATED + 1, (
        "the next are accepted in their place"
    )


def test_in_a_crowd_strangers_have_less_time(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    few = handshake.MAX_UNAUTHENTICATED // 2 + 1
    one = Knocked(few + 7, stack, monkeypatch)
    one.turn(handshake.CROWDED_HANDSHAKE_S - 0.1)
    assert one.transport.refusals.num_connections == 0
    one.turn(0.2)
    assert one.transport.refusals.num_connections == 7, "those that came when more than half were there"
    one.turn(handshake.HANDSHAKE_S - handshake.CROWDED_HANDSHAKE_S - 0.2)
    assert one.transport.refusals.num_connections == 7
    one.turn(0.2)
    assert one.transport.refusals.num_connections == few + 7
    one.members.meet().exchange(1)


def test_more_replicas_than_open_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    with pytest.raises(ConfigError, match="1000 replicas take 1256 open files in each process, and 1024 are"):
        TcpTransport(0, 1000)


@pytest.mark.parametrize("dials", [False, True], ids=["accepts", "dials"])
def test_a_lack_of_descriptors_for_tls_passes(
    dials: bool, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings are read through one."""
    clock = Clock(monkeypatch)
    members = stack.enter_context(closing(Group(2, keys=Keys.generate())))
    build, lacking = build_tls_context, [dials]

    def build_context(*args: Any, is_server: bool) -> ssl.SSLContext:
        if lacking and is_server is not dials:
            lacking.clear()
            raise OSError(errno.EMFILE, "Too many open files")
        return build(*args, is_server=is_server)

    monkeypatch.setattr(handshake, "build_tls_context", build_context)
    for view in members.views:
        view.members.connect(members.peers)
    for _ in range(20):
        for transport in members.transports:
            transport.poll(0.0)
    assert not lacking
    assert not members.views[0].members.ready.is_done
    clock.now_s += handshake.MAX_RETRY_S
    members.meet().exchange(1)


def test_a_stranger_that_has_gone_leaves_no_tls_behind(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[TlsStream]] = []

    class Seen(TlsStream):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(weakref.ref(self))

    monkeypatch.setattr(connection, "TlsStream", Seen)
    members = stack.enter_context(closing(Group(2, keys=Keys.generate())))
    members.comms[0].session.members.connect(members.peers)
    with knock(members.comms[0]) as stranger:
        stranger.sendall(CLIENT_HELLO)
        members.until(lambda: bool(made))
    members.until(lambda: members.transports[0].refusals.num_connections == 1)
    gc.collect()
    assert [one() for one in made] == [None]


# --- what they say ----------------------------------------------------------------------------------------------

MANY_NBYTES = 120 << 20
SAID = {"messages at once": b"", "an introduction of zeros": bytes(60), "the beginning of TLS": CLIENT_HELLO}


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
@pytest.mark.parametrize("what", SAID)
def test_endless_frames_of_strangers_are_not_kept(what: str, sealed: bool) -> None:
    with closing(Group(2, keys=Keys.generate() if sealed else None)) as members:
        first = members.comms[0]
        first.session.members.connect(members.peers)
        before = resident_nbytes()

        def send() -> None:
            with knock(first) as stranger, suppress(OSError):
                stranger.sendall(SAID[what])
                for _ in range(MANY_NBYTES // len(FRAME)):
                    stranger.sendall(FRAME)

        patiently(send, lambda: first.session.transport.poll(0.005))
        assert resident_nbytes() - before < 50 << 20
        members.until(lambda: first.session.transport.refusals.num_connections == 1)
        assert first.session.mailbox.ended.error is None


def test_without_descriptors_it_accepts_later() -> None:
    with closing(Group(2)) as members:
        limit, filled = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
        for comm in members.comms:
            comm.session.members.connect(members.peers)
        resource.setrlimit(resource.RLIMIT_NOFILE, (2 * descriptors(), limit[1]))
        try:
            with suppress(OSError):
                while True:
                    filled.append(os.open(os.devnull, os.O_RDONLY))
            members.until(lambda: members.transports[0].handshaker.is_paused)
        finally:
            for one in filled:
                os.close(one)
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        members.meet().exchange(1)
