"""A run that many strangers knock at, in a process that may open few files."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from unittest import mock

from farflung.comm import handshake
from farflung.comm.wire import RelayRoute
from tests.helpers import Group
from tests.late import Late
from tests.strangers import FRAME, forged, place

COUNT = 400
LIMIT = 320
_CROWD = """
import socket, sys
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
links = [socket.socket() for _ in range(count)]
for link in links:
    link.setblocking(False)
    link.connect_ex((host, port))
print("there", flush=True)
sys.stdin.read()
"""


@contextmanager
def crowd(address: str) -> Iterator[None]:
    """Inside, two processes hold as many connections to an address as they get, and say nothing."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    command = [sys.executable, "-I", "-c", _CROWD, host, port, str(COUNT // 2)]
    with ExitStack() as stack:
        for _ in range(2):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            assert process.stdout is not None
            assert process.stdout.readline() == "there\n"
        yield


def descriptors() -> int:
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def scenario() -> None:
    """A crowd is there before a run starts, and comes again once it has."""
    with mock.patch.object(handshake, "HANDSHAKE_S", 0.5), closing(Group(2)) as members:
        first = members.comms[0]
        with crowd(first.session.transport.local_peer.address_text):
            members.meet().exchange(1)
            members.until(lambda: not members.transports[0].handshaker.unauthenticated)
        assert first.session.transport.refusals.num_connections > 0
        before = descriptors()
        with crowd(first.session.transport.local_peer.address_text):
            for number in range(2, 20):
                members.exchange(number)
            assert descriptors() <= before + 4  # pipes to the crowd
        assert [comm.session.mailbox.ended.error for comm in members.comms] == [None, None]


def late_scenario() -> None:
    """A crowd is there while one is admitted, who forges, and others send without end, in such a process."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    with mock.patch.object(handshake, "HANDSHAKE_S", 0.5), closing(Late(3)) as members:
        members.meet().exchange(1)
        members.newcomer()
        first, before = members.comms[0], resident_nbytes()
        assert first.session.transport.local_peer.address is not None
        with crowd(first.session.transport.local_peer.address), ExitStack() as strangers:
            members.admit()
            endless = [strangers.enter_context(socket.socket()) for _ in range(3)]
            for link in endless:
                link.setblocking(False)
                link.connect_ex(place(first))
            for _ in range(50):
                for link in endless:
                    with suppress(OSError):  # cut off, or nobody reads it
                        link.send(FRAME)
                members.raw(2, 0, *forged(RelayRoute(1, 0, 0)))
                assert descriptors() < LIMIT
            members.until(lambda: members.views[-1].members.ready.is_done)
            members.exchange(2, 0, 2)
        assert resident_nbytes() - before < 100 << 20
        assert members.transports[0].refusals.num_messages == 50
        assert members.transports[0].refusals.num_connections > 0
        assert [comm.session.mailbox.ended.error for comm in members.comms] == [None] * 3


def resident_nbytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def hopeless_scenario() -> None:
    """The same in a process that may not open more files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    scenario()
