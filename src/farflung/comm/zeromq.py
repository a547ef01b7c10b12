"""Messages between real processes over ZeroMQ.

One ROUTER socket per replica both listens and connects: of two replicas the higher rank connects, so each pair shares
one TCP connection and works where one side alone can be reached. A routing id is a random token that only the run's
replicas learn, through the store; whatever comes from another id is refused and counted.

Whoever connects proves first who it is, and a rank is bound to that: see :mod:`farflung.comm.gate`. Off loopback
everything is encrypted too, and both ends prove themselves. Once all have come in the door is shut: see
:mod:`farflung.comm.door`.

There are no ZeroMQ heartbeats: on a missed one libzmq would close the connection and drop what it held, while TCP
carries everything across a cut by itself. A healthy but slow or silent peer is therefore only ever put out by a
deadline, whereas a connection closed from the peer's end ends the view at once.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import zmq
from torch import Tensor

from farflung.comm.blame import Blame
from farflung.comm.collectives import collective_named
from farflung.comm.connections import Connections
from farflung.comm.door import Door
from farflung.comm.gate import Gate
from farflung.comm.interface import LOOPBACK
from farflung.comm.keys import Keys
from farflung.comm.mailbox import Mailbox
from farflung.comm.peer import Peer, check_peers
from farflung.comm.staging import Stage, at_once, on_host
from farflung.comm.wire import PIECE, WHOLE, Kind, Message, WireError, decode, encode, json_of
from farflung.errors import (
    ConfigError,
    DeadlinePassed,
    FarflungError,
    PeerFailed,
    PeerLost,
    ProtocolError,
)
from farflung.tasks import Pending, done, failed
from farflung.types import AllReduce, Feature, Json, Payload, Tag, TensorSpec

__all__ = ["Peer", "ZmqCommunicator"]

ZERO_COPY_NBYTES = 1 << 19
"""Frames from this size on are sent without a copy; below it a copy takes less than waking the thread of pyzmq's that
gives each frame's memory back."""
HEAD_NBYTES = 1 << 20
"""The most that a header frame may take, and what a frame takes beside its piece of a tensor."""
KNOCK_S = 5.0
"""After how long a replica whose connection is not taken up knocks anew."""
LINGER_S = 5
PARTING_S = 1.0
"""How long a replica that leaves waits for the others to leave too."""
_CONTROL = Tag(0)
_SENT = done(None)
_FEATURES: frozenset[Feature] = frozenset({"tags", "any_source"})
_NATIVE: frozenset[Feature] = frozenset({"native"})


class ZmqCommunicator:
    """One view's communicator on real processes; see :class:`farflung.types.Communicator`.

    It belongs to one thread, which calls :meth:`poll`; only the constructor and :meth:`connect` may run before it.

    Args:
      rank: this replica.
      size: number of replicas.
      interface: the address to bind, loopback by default.
      keys: what to prove this replica with; everything is encrypted then. Off loopback there have to be some.
      view: the membership view; messages of other views are refused.
      settings: what must be equal on all ranks, by name; compared at the start.
      max_nbytes: the largest payload accepted, in bytes.
      now: the clock, in seconds.
      native: sums a tensor by the backend's collective, or ``None`` where there is none.
      stage: how a payload of another device comes to the host.

    Raises:
      ConfigError: the address is none of this machine's, or not loopback and there are no keys.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        now: Callable[[], float],
        interface: str = LOOPBACK,
        keys: Keys | None = None,
        view: int = 0,
        settings: Mapping[str, Json] | None = None,
        max_nbytes: int = 1 << 31,
        native: Callable[[Tensor], Pending[Tensor]] | None = None,
        stage: Stage = at_once,
    ) -> None:
        self.rank, self.size, self.view = rank, size, view
        self.features: frozenset[Feature] = _FEATURES | _NATIVE if native else _FEATURES
        self.auto: Mapping[int, str] = {}
        self.lane: None = None
        self.mailbox = Mailbox()
        self.refused = 0
        """Messages that were none of this run's, or malformed."""
        self.turned_away = 0
        """Connections that closed before they had proved who they were from."""
        self.ready: Pending[None] = Pending()
        self.lost: BaseException | None = None
        self._now, self._native, self._stage = now, native, stage
        self._settings = {"number of replicas": size, **(settings or {})}
        self.max_nbytes = max_nbytes
        """The largest payload accepted, in bytes; to be lowered once the model is known."""
        self._piece = PIECE if keys else WHOLE
        self._token = secrets.token_bytes(16)
        self._peers: dict[int, Peer] = {}
        self._rank_of: dict[bytes, int] = {}
        self._greeted: set[int] = set()
        self._left: set[int] = set()
        self._blame = Blame(rank)
        self._data: Pending[None] = _SENT
        self._parting: tuple[Kind, dict[str, Json]] | None = None  # what is said to everybody when leaving
        self._watched: set[int] = set()

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTING_ID, self._token),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.MAXMSGSIZE, self._piece + HEAD_NBYTES),
            (zmq.CONNECT_TIMEOUT, int(KNOCK_S * 1000)),
            (zmq.LINGER, LINGER_S * 1000),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 30),
        ):
            self._socket.setsockopt(option, value)
        self._connections = Connections(self._socket)
        self._monitor = self._connections.monitor
        self._gate = Gate(self._context, self._token, keys)
        self._door: Door | None = None
        try:
            self._door = Door(self._socket, interface, self._gate, size)
        except ConfigError:
            self.close()
            raise
        self.me = Peer(rank, self._door.address, self._token, keys.public if keys else None)
        self._poller = zmq.Poller()
        for readable in (self._socket, self._monitor, self._gate.questions):
            self._poller.register(readable, zmq.POLLIN)
        if size == 1:
            self.ready.set(None)
            self._mind_the_door()

    def connect(self, peers: Iterable[Peer]) -> None:
        """Learns everybody's address and key; connects to the lower ranks and greets them.

        Raises:
          ConfigError: a key is not on this replica's list, or some encrypt and others do not.
          ProtocolError: the peers do not make up a run.
        """
        others = [peer for peer in peers if peer.rank != self.rank]
        check_peers(self.me, others, self._gate.keys)
        for peer in others:
            self._peers[peer.rank] = peer
            self._rank_of[peer.token] = peer.rank
        self._gate.admit(peer for peer in others if peer.rank > self.rank)
        assert self._door is not None
        self._door.open()
        for peer in others:
            if peer.rank < self.rank:
                self._gate.approach(self._socket, self.rank, peer)
                self._socket.setsockopt(zmq.IPV6, "[" in peer.address)
                self._socket.setsockopt(zmq.CONNECT_ROUTING_ID, peer.token)
                self._socket.connect(peer.address)
                self._say(Kind.HELLO, peer.rank, {"rank": self.rank, "settings": self._settings})

    def missing(self) -> list[int]:
        """The ranks that have not greeted yet."""
        return [rank for rank in range(self.size) if rank != self.rank and rank not in self._greeted]

    @property
    def refusals(self) -> dict[str, Json]:
        """What has been refused so far, by kind; empty where nothing was."""
        counts = {"messages": self.refused, "connections": self.turned_away}
        return dict(counts) if any(counts.values()) else {}

    def greeting_of(self, rank: int) -> str:
        """What a wait for ``rank`` to greet waits for, with what is known of why it has not."""
        peer = self._peers.get(rank)
        if peer is None or peer.address not in self._connections.failed:
            return "its greeting"
        return f"its greeting: {peer.address} was reached, but did not prove to be that rank"

    # --- the communicator -------------------------------------------------------------------------------------

    def send(self, payload: Payload, dst: int, tag: Tag) -> Pending[None]:
        """Hands the frames to ZeroMQ's own thread, or the payload to what brings it to the host before."""
        if not on_host(payload):
            self._stage(payload, lambda host: self.send(host, dst, tag))
            return done(None)
        try:
            self._send(dst, self._frames(Kind.DATA, tag, payload))
        except PeerLost as error:
            return failed(error)
        return _SENT

    def recv(
        self, src: int | None, tag: Tag, expect: tuple[TensorSpec, ...] | None = None
    ) -> Pending[Payload]:
        """Waits for a message."""
        return self.mailbox.recv(src, tag, expect, self._now())

    def collective(self, name: str) -> AllReduce:
        """Hop by hop."""
        return collective_named(name).run

    def all_reduce(self, tensor: Tensor, tag: Tag) -> Pending[Tensor]:
        """The backend's sum; calls match by their order, so all ranks make them in the same one."""
        del tag
        if self._native is None:
            raise RuntimeError("native collectives were not asked for when the run began")
        return self._native(tensor)

    # --- the thread's side ------------------------------------------------------------------------------------

    def watch(self, fd: int) -> None:
        """Lets :meth:`poll` wake up when ``fd`` becomes readable."""
        self._poller.register(fd, zmq.POLLIN)
        self._watched.add(fd)

    def poll(self, timeout_s: float | None) -> bool:
        """Waits for something to happen, and delivers all there is; whether a watched descriptor is readable."""
        events = dict(self._poller.poll(None if timeout_s is None else max(0, int(timeout_s * 1000 + 0.999))))
        if self._gate.questions in events:
            self._gate.answer()
        if self._socket in events:
            self._receive_all()
        if self._monitor in events or self._connections.any_closed:
            self._look_for_losses()
        return not self._watched.isdisjoint(events)

    def check_deadline(self, deadline_s: float) -> float | None:
        """Ends the view when the oldest wait is older than ``deadline_s``; returns when to look again.

        Halfway there it tells everybody whom it waits for, and is told what they wait for; see
        :class:`farflung.comm.blame.Blame`. So a replica that is itself held up by another is not taken for the one
        that was lost, and time in which samples are waited for counts against nobody.
        """
        waiting, now = self.mailbox.oldest(), self._now()
        holdup = self._blame.holdup(waiting)
        for rank in self._blame.to_tell(holdup, now, deadline_s):
            if rank in self._present():
                self._say(Kind.WAITING, rank, {"for": holdup})
        if waiting is None:
            return None
        since = self._blame.counts_from(waiting)
        if now - since >= deadline_s:
            root = self._blame.root_of(waiting.src)
            self.end(DeadlinePassed(root, waiting.what, now - waiting.since, slow=True))
            return None
        if now - since >= deadline_s / 2 and self._blame.asks(waiting):
            for rank in self._present():
                self._say(Kind.WAITING, rank, {"for": holdup, "asks": True})
        return since + (deadline_s if self._blame.asked(waiting) else deadline_s / 2)

    def waits_for_data(self, ready: Pending[None]) -> None:
        """This replica waits for samples until ``ready`` is done, which it also is when the view ends."""
        self._blame.waits_for_data = True
        self._data = ready
        if self.lost is not None:
            ready.fail(self.lost)

    def has_data(self) -> None:
        """It does so no more."""
        self._blame.waits_for_data = False

    def end(self, error: BaseException) -> None:
        """Ends the view: every wait fails with ``error``, and so does every later one."""
        if self.lost is None:
            self.lost = error
        self.mailbox.end(self.lost)
        self.ready.fail(self.lost)
        self._data.fail(self.lost)

    def farewell(self, error: BaseException | None) -> None:
        """Tells everybody that this replica leaves, and why if it failed by itself."""
        body: dict[str, Json]
        if error is None:
            kind, body = Kind.FAREWELL, {}
        elif isinstance(error, (PeerLost, PeerFailed, DeadlinePassed)):
            kind, body = Kind.ABORT, {"detail": str(error), "rank": error.rank}
        else:
            detail = str(error) if isinstance(error, FarflungError) else f"{type(error).__name__}: {error}"
            kind, body = Kind.ABORT, {"detail": detail, "rank": self.rank}
        self._parting = (kind, body)
        for rank in self._peers.keys() - self._left:
            if rank in self._greeted or rank < self.rank:
                self._say(kind, rank, body)
        # See who leaves before closing: a message for a peer that closes at the same moment would wait for a
        # reconnection as long as it may linger, and who has not greeted yet would never learn why nobody answers.
        until = self._now() + PARTING_S
        while self._peers.keys() - self._left and (left_s := until - self._now()) > 0:
            self.poll(left_s)

    def close(self) -> None:
        """Closes the sockets; what was sent to those still here leaves, for a few seconds at most."""
        if self._door is not None:
            self._door.close()
        self._connections.close()
        self._gate.close()
        self._socket.close(linger=LINGER_S * 1000 if self._present() else 0)
        self._context.term()

    def _present(self) -> set[int]:
        return self._greeted - self._left

    def _receive_all(self) -> None:
        receive, state = self._socket.recv, self._socket.getsockopt
        while int(state(zmq.EVENTS)) & zmq.POLLIN:
            sender = receive()
            frames = [receive(copy=False)]
            while frames[-1].more:
                frames.append(receive(copy=False))
            try:
                self._take(self._rank_of.get(sender), frames)
            except WireError as error:
                self.refused += 1
                self._report(f"a message ({error})")

    def _take(self, rank: int | None, frames: list[zmq.Frame]) -> None:
        if rank is None:
            raise WireError("a message from nobody of this run")
        message = decode([frame.buffer for frame in frames], max_nbytes=self.max_nbytes, piece=self._piece)
        if message.view != self.view:
            raise WireError("a message of another view")
        if message.kind is not Kind.HELLO:
            # A greeting is held against what its connection has proved; all else has to come over the same one.
            if self._connections.rank_of(frames[0].get(zmq.SRCFD)) != rank:
                raise WireError("a message under another's name")
        if message.kind is Kind.DATA:
            self._blame.moves(rank)
            self.mailbox.deliver(rank, message.tag, message.payload, self._now())
        else:
            self._control(rank, message, frames[0])

    def _control(self, rank: int, message: Message, frame: zmq.Frame) -> None:
        body = json_of(message.payload)
        if message.kind is Kind.HELLO:
            due = self._gate.name_of(self._peers[rank]) if rank > self.rank else None
            if body.get("rank") != rank or self._gate.named(frame) != due:
                raise WireError("a greeting under another's name")
            self._connections.bind(frame.get(zmq.SRCFD), rank)
            if rank > self.rank:
                self._say(Kind.HELLO, rank, {"rank": self.rank, "settings": self._settings})
            if self._parting is not None:
                self._say(self._parting[0], rank, self._parting[1])
            self._greeted.add(rank)
            self._compare(rank, body.get("settings"))
            self._mind_the_door()
            if not self.missing():
                self.ready.set(None)
        elif message.kind is Kind.FAREWELL:
            self._left.add(rank)
            self.mailbox.fail_from(rank, PeerLost(rank, "it had left the run"))
        elif message.kind is Kind.WAITING:
            self._blame.heard(rank, body, self.mailbox.oldest(), self._now())
        elif message.kind is Kind.ABORT:
            self._left.add(rank)
            failed_rank, detail = body.get("rank"), str(body.get("detail"))
            if failed_rank == rank:
                self.end(PeerFailed(rank, detail))
            elif isinstance(failed_rank, int) and failed_rank != self.rank:
                self.end(PeerLost(failed_rank, f"rank {rank} says: {detail}"))
            else:
                self.end(PeerLost(rank, f"it left, saying: {detail}"))

    def _compare(self, rank: int, theirs: object) -> None:
        if not isinstance(theirs, dict):
            raise WireError("a greeting without settings")
        for name in sorted(self._settings.keys() | theirs.keys()):
            mine, other = self._settings.get(name), theirs.get(name)
            if mine != other:
                self.end(
                    ProtocolError(
                        f"ranks disagree on {name}: {mine!r} on rank {self.rank}, {other!r} on rank {rank}; "
                        "start all of them with the same command"
                    )
                )
                return

    def _look_for_losses(self) -> None:
        self._connections.read()
        # What a peer sent before it went is in the socket by now, its farewell too.
        self._receive_all()
        ranks, strangers = self._connections.take_closed()
        if strangers:
            self.turned_away += strangers
            self._report("a connection")
        self._mind_the_door()
        for rank in ranks:
            if rank not in self._left:
                self._left.add(rank)
                self.end(PeerLost(rank, "its connection was closed from its end"))
        for rank, peer in self._peers.items():
            if peer.address in self._connections.denied and rank not in self._greeted:
                self.end(
                    ProtocolError(
                        f"rank {rank} does not accept this replica's key: it was given another list"
                    )
                )

    def _mind_the_door(self) -> None:
        assert self._door is not None
        self._door.mind(sum(rank > self.rank for rank in self.missing()), self._connections.waiting)

    def _report(self, what: str) -> None:
        if self.refused + self.turned_away == 1:
            logging.getLogger("farflung").warning(
                "rank %d at %s: refused %s that is not of this run; all of them are counted",
                self.rank,
                self.me.address,
                what,
            )

    def _say(self, kind: Kind, rank: int, body: Mapping[str, Json]) -> None:
        text = torch.frombuffer(bytearray(json.dumps(body).encode()), dtype=torch.uint8)
        try:
            self._send(rank, self._frames(kind, _CONTROL, Payload((text,))))
        except PeerLost as error:
            self.end(error)

    def _frames(self, kind: Kind, tag: Tag, payload: Payload) -> list[Any]:
        return encode(kind, self.view, tag, payload, piece=self._piece)

    def _send(self, rank: int, frames: list[Any]) -> None:
        try:
            self._socket.send(self._peers[rank].token, zmq.SNDMORE)
            for frame in frames[:-1]:
                self._socket.send(frame, zmq.SNDMORE, copy=len(frame) < ZERO_COPY_NBYTES)
            self._socket.send(frames[-1], copy=len(frames[-1]) < ZERO_COPY_NBYTES)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise PeerLost(rank, "its connection is gone") from None
