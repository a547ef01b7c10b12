"""Messages between real processes over TCP, encrypted with TLS 1.3 between machines.

Of two ranks one connects (:func:`farflung.comm.peer.connects`), so it is enough that the other can be reached, at one
port. Each connection begins with an introduction: the acceptor sends a nonce, the dialler answers with its rank and a
proof that it knows the tokens of both, which the run's store has told the run's processes alone, and the acceptor
proves the same. With keys all of this is inside TLS, and the certificate of the other end has to be the one that was
published for its rank, byte by byte: that the certificate verifies is not enough.

Until then a connection is a stranger's. It costs a descriptor, is cut off at a deadline, and counts against a bound;
where the bound is reached, or no member is due, nothing is accepted.

There are no heartbeats: TCP carries everything across a cut by itself. A slow or silent peer is given up by a deadline
alone, whereas a connection closed from the peer's end is told at once.
"""

from __future__ import annotations

import errno
import hmac
import logging
import math
import os
import resource
import secrets
import socket
import ssl
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

from torch import Tensor

from farflung.comm.endpoint import MOST_CONNECTIONS, NO_WAY_IN, advertised
from farflung.comm.framing import SEALED_PIECE_NBYTES
from farflung.comm.interface import LOOPBACK, is_loopback, tcp
from farflung.comm.keys import Keys, certificate_of, tls_context
from farflung.comm.link import Link, Path, State
from farflung.comm.loop import Loop
from farflung.comm.peer import CHALLENGE, HELLO, PROOF_NBYTES, VISITOR, Peer, connects
from farflung.comm.pool import Pool
from farflung.comm.records import CONTROL, FIRST, LAST, Landings, Receiver, Sender
from farflung.comm.transport import Listener, Traffic
from farflung.comm.wire import MAGIC, VERSION, Frame, Head, Message, WireError
from farflung.errors import ConfigError, PeerLost
from farflung.network.tcp import LARGEST_WINDOW_BITS, CongestionControl, window_share_bps
from farflung.tasks import Pending, failed

__all__ = ["TcpTransport"]

HANDSHAKE_S = 10.0
"""How long a connection may take until both ends have proved which ranks they are."""
CROWDED_S = 2.0
"""The same where more than half as many strangers are there as may be."""
CROWD = 64
"""Strangers at once, beside the members that are due."""
RETRY_S, RETRY_MOST_S = 0.2, 5.0
"""After how long a rank dials again, doubled each time, and the most."""
QUICK_DIALS, QUICK_S = 200, (0.5, 0.5, 0.5, 1.5)
"""How often a rank that was connected before is dialled soon, and for how many seconds at a time, in turn: the kernel
asks again after 1 second."""
LINGER_S = 5.0
"""How long nothing of what was sent may leave at the end; for peers that are no members any more, all of it."""
OTHERS_S = 1.0
"""How long the other connections to a peer may take to end, once one of them has."""
MOST_UNASKED = 16
"""Connections to a peer where no number was asked for."""
WIDEN_S = 2.0
"""After how much busy time it is seen whether more connections would help."""
WORTH = 1.25
"""By how much twice as many connections have to be faster."""
SHORT_S = 0.005
"""Round trips below this need no more than one."""
_BACKLOG = 128
_BURST = 32
"""Connections that are accepted in a row."""
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ENOUGH_DESCRIPTORS = 1 << 16
_RESERVE = 256
"""Descriptors for all but members' connections: files, threads' own, strangers."""


def _proof(nonce: bytes, of: bytes, to: bytes, *said: int) -> bytes:
    """Proves, to the process with one token and for this connection alone, that the other one is known."""
    return hmac.digest(to, nonce + of + struct.pack(f"<{len(said)}I", *said), "sha256")


@dataclass(eq=False)
class _Member:
    """A peer that is let in or connected to.

    Args:
      peer: how it is reached and recognised.
      landings: what arrives from it.
    """

    peer: Peer
    landings: Landings
    sender: Sender = field(default_factory=Sender)
    links: dict[int, Link] = field(default_factory=dict)
    """Its connections, by number."""
    wanted: int = 1
    """How many there are to be."""
    ended: bool = False
    """Whether its connections have ended."""
    again: bool = False
    """Whether it was connected before."""
    dials: int = 0
    """How often it was dialled since."""
    failed: bool = False
    """Whether a process was reached at its address that did not prove to be it."""
    settled: bool = False
    """Whether more connections have not helped."""
    looked_s: float = 0.0
    sent: int = 0
    rate_bps: float = 0.0
    """When the first connection had been busy for so long, how much all of them had sent, and how fast."""


class TcpTransport:
    """The connections of one process; see :class:`farflung.comm.transport.Transport`.

    Args:
      rank: this process.
      size: number of processes of the run.
      interface: the address to listen at, loopback by default.
      ports: at the first of these that is free; 0: any.
      advertise: the host, or host and port, by which peers reach this process, where that is not the address that it
        listens at: behind port forwarding, in a container. ``"none"``: no peer can connect to it, and it does not
        listen.
      keys: what to prove this process with; everything is encrypted then. Off loopback there have to be some.
      later: whether peers may come later than the first meeting.
      connections: to each peer, for bulk; ``None``: as many as help, see :meth:`busy`.

    Raises:
      ConfigError: the address is none of this machine's, or not loopback and there are no keys; or this process may
        not open enough files.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        interface: str = LOOPBACK,
        ports: Sequence[int] = (0,),
        advertise: str | None = None,
        keys: Keys | None = None,
        later: bool = False,
        connections: int | None = None,
    ) -> None:
        local = is_loopback(interface)
        if not local and keys is None:
            raise ConfigError(
                f"interface {interface}: nothing leaves this machine without encryption, which takes keys"
            )
        _raise_limit(size, connections or 1)
        self.keys = keys
        self.refused = self.turned_away = 0
        self.max_nbytes = 1 << 31
        self._said_at = 1
        """How many refusals there are when it is logged next how many."""
        self._later, self._connections = later, connections
        self._listener: Listener | None = None
        self._members: dict[int, _Member] = {}
        self._early: set[Link] = set()
        """Connections that are no member's yet."""
        self._leaving: set[Link] = set()
        """Those of peers that are members no more, of which something is to leave."""
        self._busy: set[int] = set()
        """Ranks for which something may wait since the last :meth:`poll`."""
        self._due = size - 1
        self._visits: tuple[bytes, Callable[[bytes], bytes]] | None = None
        self._rests = self._closes = False
        self.scratch = memoryview(bytearray(SEALED_PIECE_NBYTES))
        """For what arrives encrypted, on its way to TLS."""
        self._pool = Pool()
        self._tls: ssl.SSLContext | None = None
        self._loop = Loop()
        self._door: socket.socket | None = None
        self._reads_door = False
        address: str | None = None
        try:
            if advertise != NO_WAY_IN:
                self._door = _door(interface, ports, size + _BACKLOG)
                port = self._door.getsockname()[1]
                address = f"{tcp(interface)}:{port}" if advertise is None else advertised(advertise, port)
        except ConfigError:
            self.close(linger=False)
            raise
        machine = socket.gethostname() if local and advertise is None else None
        self.me = Peer(rank, address, secrets.token_bytes(16), keys.public if keys else None, machine)
        _open.add(self)

    # --- members ----------------------------------------------------------------------------------------------------

    def open(self, others: Sequence[Peer], listener: Listener, *, again: bool = False) -> None:
        self._listener = listener
        for peer in others:
            self.dismiss(peer.rank)
            landings = Landings(partial(self._memory, peer.rank), lambda: self.max_nbytes)
            self._members[peer.rank] = _Member(peer, landings, wanted=self._connections or 1, again=again)
        self._tls = None
        for peer in others:
            if connects(self.me, peer) or (again and peer.address is not None):
                self._dial(self._members[peer.rank], 0, RETRY_S)
        self._mind()

    def _memory(self, rank: int, head: Head, number: int) -> Tensor:
        """Finds room for a large tensor of a message: where it is waited for, if that is known."""
        assert self._listener is not None
        nbytes = head.large[number]
        room = None if number else self._listener.room(rank, head, nbytes)
        return self._pool.tensor(nbytes) if room is None else room

    def dismiss(self, rank: int) -> None:
        member = self._members.pop(rank, None)
        if member is None:
            return
        self._tls = None
        for link in [link for link in self._early if link.dialled == rank]:
            link.end(None)
        member.sender.close(PeerLost(rank, "its connection is gone"), keep_control=True)
        links, member.links = member.links, {}
        self._leaving.update(links.values())
        for link in links.values():
            link.close_soon()
            self._loop.call_later(LINGER_S, partial(link.end, None))
        self._mind()

    def expects(self, count: int) -> None:
        self._due = count
        self._mind()

    def receive(self, key: bytes, answer: Callable[[bytes], bytes]) -> None:
        self._visits, self._tls = (key, answer), None
        self._mind()

    def quiet_s(self, rank: int) -> float:
        links = self._members[rank].links.values() if rank in self._members else ()
        return min((time.monotonic() - link.read_s for link in links), default=math.inf)

    def traffic(self, rank: int) -> Traffic:
        member = self._members.get(rank)
        if member is None:
            return Traffic(0, 0)
        heard = sum(link.read_nbytes for link in member.links.values())
        return Traffic(heard, member.landings.nbytes + member.sender.taken_nbytes)

    def failed_at(self, rank: int) -> bool:
        return rank in self._members and self._members[rank].failed

    # --- sending ----------------------------------------------------------------------------------------------------

    @property
    def held_nbytes(self) -> int:
        queued = sum(member.sender.nbytes for member in self._members.values())
        return queued + sum(link.unsent for link in self._links())

    def _links(self) -> list[Link]:
        """The connections of those that are members, or were."""
        return [
            *self._leaving,
            *(link for member in self._members.values() for link in member.links.values()),
        ]

    def send(self, rank: int, frames: Sequence[Frame], *, priority: int = 0, view: int = 0) -> Pending[None]:
        member = self._members.get(rank)
        if member is None or member.ended:
            return failed(PeerLost(rank, "its connection is gone"))
        left = member.sender.put(frames, priority, view)
        if rank not in self._busy:  # what follows in this turn leaves together
            self._busy.add(rank)
            for link in tuple(member.links.values()):
                link.flush()
        return left

    def say(self, rank: int, frames: Sequence[Frame], *, last: bool = False) -> None:
        said = self.send(rank, frames, priority=LAST if last else FIRST, view=CONTROL)
        if said.error is not None:
            raise said.error
        self._flush()

    def withdraw(self, view: int) -> None:
        for rank, member in self._members.items():
            member.sender.withdraw(view)
            self._busy.add(rank)

    def _flush(self) -> None:
        while self._busy:
            member = self._members.get(self._busy.pop())
            if member is not None:
                for link in tuple(member.links.values()):
                    link.flush()

    # --- hearing ----------------------------------------------------------------------------------------------------

    def watch(self, fd: int, readable: Callable[[], None]) -> None:
        self._loop.watch(fd, readable=readable)

    def call_later(self, seconds: float, fn: Callable[[], object]) -> None:
        self._loop.call_later(seconds, fn)

    def poll(self, timeout_s: float | None) -> None:
        self._flush()
        self._loop.once(timeout_s)

    def arrived(self, link: Link, message: Message) -> None:
        """A member's message is there."""
        assert self._listener is not None
        assert link.rank is not None
        try:
            self._listener.arrived(link.rank, message)
        except WireError as error:
            self._refuse(error)

    def malformed(self, link: Link, nbytes: int, error: WireError) -> None:
        """What a member has sent cannot be read."""
        assert self._listener is not None
        assert link.rank is not None
        self._refuse(error)
        self._listener.malformed(link.rank, nbytes, str(error))
        self.dismiss(link.rank)

    def _refuse(self, error: WireError) -> None:
        self.refused += 1
        self._report(f"a message ({error})")

    def _report(self, what: str) -> None:
        count = self.refused + self.turned_away
        if count >= self._said_at:
            self._said_at = 2 * count
            logging.getLogger("farflung").warning(
                "rank %d at %s: refused %s that is not of this run; %d messages and %d connections so far",
                self.me.rank,
                self.me.where,
                what,
                self.refused,
                self.turned_away,
            )

    # --- connecting -------------------------------------------------------------------------------------------------

    def _dial(self, member: _Member, index: int, again_s: float) -> None:
        peer = member.peer
        if self._closes or member.ended or self._members.get(peer.rank) is not member:
            return
        host, port = peer.host_and_port
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        except OSError:  # no descriptor is free
            self._loop.call_later(RETRY_MOST_S, partial(self._dial, member, index, again_s))
            return
        sock.setblocking(False)
        context = None if self.keys is None else tls_context(self.keys, [peer.key or ""], server=False)
        link = Link(self._loop, self, sock, peer.rank, context)
        link.index = index
        if connects(self.me, peer):  # and no probe
            quick = member.again and member.dials < QUICK_DIALS
            again = partial(self._dial, member, index, again_s if quick else min(2 * again_s, RETRY_MOST_S))
            link.retry = partial(self._loop.call_later, again_s, again)
            if quick:
                member.dials += 1
                self._loop.call_later(QUICK_S[member.dials % len(QUICK_S)], link.give_up_connecting)
        self._await(link, HANDSHAKE_S)
        link.connect((host, port))

    def _accept(self) -> None:
        assert self._door is not None
        for _ in range(_BURST):
            if not self._reads_door:
                return
            try:
                sock, _ = self._door.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _NO_DESCRIPTORS:
                    self._rests = True
                    self._loop.call_later(1.0, self._rested)
                    self._mind()
                    return
                continue  # it was closed before it was accepted
            sock.setblocking(False)
            link = Link(self._loop, self, sock, None, self._server_context())
            crowded = sum(one.dialled is None for one in self._early) > CROWD // 2
            self._await(link, min(CROWDED_S, HANDSHAKE_S) if crowded else HANDSHAKE_S)
            link.begin()
            self._mind()

    def _await(self, link: Link, seconds: float) -> None:
        """Ends a connection that is no member's after so many seconds."""
        self._early.add(link)

        def give_up() -> None:
            if link in self._early:
                link.end(TimeoutError())

        self._loop.call_later(seconds, give_up)

    def _rested(self) -> None:
        self._rests = False
        self._mind()

    def _mind(self) -> None:
        """Accepts where a member is due and not too many strangers are there."""
        if self._door is None or self._listener is None or self._closes:
            return
        more = sum(
            member.wanted - len(member.links)
            for member in self._members.values()
            if member.links and connects(member.peer, self.me)
        )
        due = self._due + more
        strangers = sum(link.dialled is None for link in self._early)
        reads = (due > 0 or self._visits is not None) and strangers < CROWD + due and not self._rests
        if reads != self._reads_door:
            self._reads_door = reads
            self._loop.watch(self._door.fileno(), readable=self._accept if reads else None)

    def _server_context(self) -> ssl.SSLContext | None:
        """The settings for those that connect: their certificates are those of the members."""
        if self.keys is not None and self._tls is None:
            peers = [member.peer.key or "" for member in self._members.values()]
            self._tls = tls_context(self.keys, peers, server=True)
            if self._visits is not None:
                self._tls.verify_mode = ssl.CERT_OPTIONAL  # a visitor shows none, and a member has to
        return self._tls

    def connected(self, link: Link) -> None:
        """A connection is there, and TLS where there is any: the introduction begins."""
        if link.dialled is None:
            link.nonce = secrets.token_bytes(16)
            link.expect(HELLO.size)
            link.say(CHALLENGE.pack(MAGIC, VERSION, link.nonce))
        elif self._is_of(link, self._members[link.dialled].peer):
            link.expect(CHALLENGE.size)
        else:
            link.end(ConnectionError("another certificate"))

    def _is_of(self, link: Link, peer: Peer) -> bool:
        return self.keys is None or link.certificate() == certificate_of(peer.key or "")

    def heard(self, link: Link, said: bytes) -> None:
        """A part of the introduction has been heard."""
        if link.hears is not None:
            link.hears(said)
            return
        if link.dialled is None:
            self._introduced(link, *HELLO.unpack(said))
            return
        member = self._members[link.dialled]
        mine, theirs = self.me.token, member.peer.token
        if link.nonce:
            if hmac.compare_digest(said, _proof(link.nonce, theirs, mine)):
                self._promote(member, link)
            else:
                link.end(ConnectionError("another rank"))
            return
        magic, version, nonce = CHALLENGE.unpack(said)
        if (magic, version) != (MAGIC, VERSION):
            link.end(ConnectionError("another protocol or version"))
            return
        link.nonce = secrets.token_bytes(16)
        link.expect(PROOF_NBYTES)
        proof = _proof(nonce, mine, theirs, self.me.rank, link.index)
        link.say(HELLO.pack(self.me.rank, link.index, link.nonce, proof))

    def _introduced(self, link: Link, rank: int, index: int, nonce: bytes, proof: bytes) -> None:
        """A connection says that it is of a rank."""
        if rank == VISITOR and self._visits is not None:
            self._visited(link, self._visits, nonce, proof)
            return
        member = self._members.get(rank)
        mine = self.me.token
        if (
            member is None
            or not hmac.compare_digest(proof, _proof(link.nonce, member.peer.token, mine, rank, index))
            or not self._is_of(link, member.peer)
        ):
            link.end(ConnectionError("no member"))
            return
        if member.ended or not connects(member.peer, self.me):
            self._early.discard(link)  # no stranger: it comes too early, or is a probe
            link.end(None)
            return
        if index in member.links or index >= (member.wanted if member.links else 1):
            link.end(ConnectionError("no member"))
            return
        link.index = index
        link.say(_proof(nonce, mine, member.peer.token))
        if link.state is not State.GONE:
            self._promote(member, link)

    def _visited(
        self, link: Link, visits: tuple[bytes, Callable[[bytes], bytes]], nonce: bytes, proof: bytes
    ) -> None:
        """A connection says that it is a visitor's; see :mod:`farflung.comm.visits`."""
        from farflung.comm.visits import LENGTH, MOST_NBYTES, visit_proof

        (key, answer), nonces = visits, link.nonce + nonce
        if not hmac.compare_digest(proof, visit_proof(key, "visitor", nonces, self.me.key)):
            link.end(ConnectionError("no visitor"))
            return

        def asks(said: bytes) -> None:
            self._early.discard(link)
            self._leaving.add(link)
            text = answer(said)
            link.see_off(LENGTH.pack(len(text)) + text)
            self._loop.call_later(LINGER_S, partial(link.end, None))
            self._mind()

        def begins(said: bytes) -> None:
            (nbytes,) = LENGTH.unpack(said)
            link.hears = asks
            if 0 < nbytes <= MOST_NBYTES:
                link.expect(nbytes)
            else:
                link.end(ConnectionError("no question"))

        link.hears = begins
        link.expect(LENGTH.size)
        link.say(visit_proof(key, "member", nonces, self.me.key))

    def _promote(self, member: _Member, link: Link) -> None:
        self._early.discard(link)
        member.failed = False
        member.links[link.index] = link
        if link.index == 0 and member.wanted > 1:
            member.sender.links(member.wanted)
        receiver = Receiver(member.landings, first=link.index == 0, links=partial(self._widened, member))
        link.promote(member.peer.rank, member.sender, receiver, member.links)
        self._mind()

    # --- several connections ----------------------------------------------------------------------------------------

    def _widen(self, member: _Member, count: int) -> None:
        """Asks for so many connections to a peer."""
        member.wanted = count
        member.sender.links(count)
        self._busy.add(member.peer.rank)
        self._mind()

    def _widened(self, member: _Member, count: int) -> None:
        """A peer wants so many connections, and expects them: this rank agrees, and makes them where it is to."""
        if member.wanted < count <= MOST_CONNECTIONS:
            self._widen(member, count)
        if connects(self.me, member.peer):
            dialled = {link.index for link in self._early if link.dialled == member.peer.rank}
            for index in range(1, min(count, member.wanted)):
                if index not in member.links and index not in dialled:
                    self._dial(member, index, RETRY_S)

    def busy(self, link: Link) -> None:
        """A connection has had more to send than it could: more of them are made as long as that helps.

        Where one comes to at least half of what its losses and its window allow, these hold it up and not the network,
        and twice as many connections are worth a try. Where all of them together did not become faster by a quarter, it
        stays at that.
        """
        member = self._members.get(-1 if link.rank is None else link.rank)
        if member is None or self._connections is not None or link.index or member.settled:
            return
        took_s = link.busy_s - member.looked_s
        path = link.path() if took_s >= WIDEN_S else None
        if path is None or path.round_trip_s < SHORT_S:
            return
        sent = sum(one.busy_nbytes for one in member.links.values())
        rate_bps = 8 * (sent - member.sent) / took_s
        member.looked_s, member.sent = link.busy_s, sent
        if rate_bps < WORTH * member.rate_bps or 2 * member.wanted > MOST_UNASKED:
            member.settled = True
        elif rate_bps / len(member.links) >= _reach_bps(path) / 2:
            member.rate_bps = rate_bps
            self._widen(member, 2 * member.wanted)

    # --- the end ----------------------------------------------------------------------------------------------------

    def gone(self, link: Link, was: State, error: Exception | None) -> None:
        """A connection has ended."""
        self._leaving.discard(link)
        member = self._members.get(-1 if link.rank is None else link.rank)
        if link in self._early:
            self._early.discard(link)
            if self._closes:
                return
            if link.dialled is None:
                self.turned_away += 1
                self._report("a connection")
            elif member is not None:
                self._missed(member, link, was, error)
            self._mind()
        elif link.rank is not None:
            link.abandon(PeerLost(link.rank, "its connection is gone"))
            if member is not None and member.links.get(link.index) is link:
                del member.links[link.index]
                self._ended(member)

    def _missed(self, member: _Member, link: Link, was: State, error: Exception | None) -> None:
        """A connection that this rank has made has not come to be a member's."""
        if member.again and isinstance(error, ConnectionRefusedError):
            assert self._listener is not None
            self._listener.ended(member.peer.rank)
            return
        if was is not State.CONNECTING and not isinstance(error, TimeoutError):
            member.failed = True
        if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or "") and not self._later:
            assert self._listener is not None
            self._listener.denied(member.peer.rank)
        link.retry()

    def _ended(self, member: _Member) -> None:
        """One of a member's connections has ended: the others end too, or it is lost without them."""
        for link in tuple(member.links.values()):
            while link.read():
                pass
        if not member.links:
            self._lose(member)
        elif not member.ended:
            self._loop.call_later(OTHERS_S, partial(self._lose, member))

    def _lose(self, member: _Member) -> None:
        if member.ended or self._closes:
            return
        member.ended = True
        rank = member.peer.rank
        links, member.links = member.links, {}
        for link in links.values():
            link.end(None)
        member.sender.close(PeerLost(rank, "its connection is gone"))
        if self._members.get(rank) is member and self._listener is not None:
            self._listener.closed(rank)

    def close(self, *, linger: bool) -> None:
        self._closes = True
        _open.discard(self)
        for link in tuple(self._early):
            link.end(None)
        if self._door is not None:
            self._loop.watch(self._door.fileno())
            self._door.close()
        links = self._links()
        if linger:
            for link in links:
                link.close_soon()
            until, least = time.monotonic() + LINGER_S, math.inf
            while (left := sum(link.unsettled_nbytes() for link in links)) and time.monotonic() < until:
                if left < least:
                    until, least = time.monotonic() + LINGER_S, left
                self._loop.once(0.01)
        for link in links:
            link.end(None)
        self._loop.close()

    def abandon(self) -> None:
        """Closes what a child process has inherited, so that the parent's end ends its connections."""
        for link in (*self._early, *self._links()):
            link.sock.close()
        if self._door is not None:
            self._door.close()
        self._loop.close()


_open: weakref.WeakSet[TcpTransport] = weakref.WeakSet()
"""The transports of this process."""


def _abandon_all() -> None:
    for transport in tuple(_open):
        transport.abandon()
    _open.clear()


os.register_at_fork(after_in_child=_abandon_all)


def _reach_bps(path: Path) -> float:
    """What one connection can carry at most, by its losses and by the largest window."""
    control: Any = path.control if path.control in get_args(CongestionControl) else None
    by_loss = window_share_bps(control, path.loss, path.round_trip_s)
    return min(by_loss, LARGEST_WINDOW_BITS / path.round_trip_s)


def _door(interface: str, ports: Sequence[int], backlog: int) -> socket.socket:
    """Listens at the first port that is free."""
    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    for port in ports:
        try:
            door = socket.create_server((interface, port), family=family, backlog=backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(f"interface {interface}: cannot listen there ({error.strerror})") from None
        else:
            door.setblocking(False)
            return door
    span = f"port {ports[0]}" if len(ports) == 1 else f"ports {ports[0]} to {ports[-1]}"
    raise ConfigError(
        f"interface {interface}: {span} in use: give others with --port, one for each replica here"
    )


def _raise_limit(size: int, connections: int) -> None:
    """Lets this process open as many files as a run of ``size`` replicas takes, and as strangers may make it open.

    Raises:
      ConfigError: it may not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    most = _ENOUGH_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH_DESCRIPTORS)
    most, needed = max(soft, most), connections * size + _RESERVE
    if most < needed:
        raise ConfigError(
            f"{size} replicas take {needed} open files in each process, and {most} are allowed: raise ulimit -n"
        )
    if soft < most:
        with suppress(OSError, ValueError):  # macOS allows fewer than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
