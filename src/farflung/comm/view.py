"""View session of a real process: admission, messages, the failure detector, and how members leave."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from farflung.comm.channel import RELAYED, kind_of, of_no_view
from farflung.comm.mailbox import KEPT_NBYTES, Full, Mailbox
from farflung.comm.meeting import Meeting
from farflung.comm.records import CONTROL
from farflung.comm.relay import Relay
from farflung.comm.staging import Stage, at_once, on_host
from farflung.comm.transport import FIRST, LAST, Transport
from farflung.comm.waits import Waits
from farflung.comm.wire import (
    DIRECT,
    Head,
    Kind,
    Message,
    Route,
    Unauthorized,
    WireError,
    encode,
    json_of,
)
from farflung.errors import DeadlinePassed, FarflungError, PeerFailed, PeerLost, ProtocolError
from farflung.tasks import Pending, failed
from farflung.types import Json, Payload, Sent, Tag

__all__ = ["View"]

PARTING_S = 1.0
"""Seconds for which a leaving rank waits for its peers to leave too."""
STUCK_S = 5.0
"""Seconds without any byte sent after which a leaving rank drops its unsent messages."""
CLOSED = "its connection was closed from its end"
_CONTROL = Tag(0)


class View(Meeting):
    """Session of one rank in a membership view.

    It belongs to the thread that polls the transport; only the constructor and :meth:`connect` may run before it.

    Args:
      transport: Transport of the view's messages.
      size: World size.
      read_clock: Clock, in seconds.
      number: Number of the view at first, see :meth:`advance_view`.
      needs_all_members: True if the loss of a member ends the view, as it must if exchanges need all ranks; otherwise
        only waits for that member fail.
      members: Initial members, including this rank; all ranks when not given. A view that does not need all
        members may admit more later.
      settings: Values that must be equal on all members, by name; compared at the start.
      max_nbytes: Largest payload accepted, in bytes.
      max_unreceived_nbytes: Most bytes of unreceived messages of each sender. When not given, there is no limit if
        the view needs all members, and :data:`farflung.comm.mailbox.MAX_UNRECEIVED_NBYTES` otherwise.
    """

    def __init__(
        self,
        transport: Transport,
        size: int,
        *,
        now: Callable[[], float],
        number: int = 0,
        whole: bool = True,
        members: Iterable[int] | None = None,
        settings: Mapping[str, Json] | None = None,
        max_nbytes: int = 1 << 31,
        kept_nbytes: float | None = None,
    ) -> None:
        super().__init__(transport, size, whole=whole, members=members, settings=settings)
        self.mailbox = Mailbox(kept_nbytes or (math.inf if whole else KEPT_NBYTES))
        self.mailbox.view = number
        self.lost: BaseException | None = None
        """Error that has ended the view."""
        self.left = "it had left the run"
        """Error detail of waits for a sender that has left."""
        transport.max_nbytes = max_nbytes
        self.now = now
        """Clock, in seconds."""
        self.sent = Sent(size)
        """Payload bytes sent so far."""
        self.stage: Stage = at_once
        """Copies a payload of another device to the host."""
        self.waits = Waits(self)
        self.relay = Relay(transport, self.routes, size, detours=not whole)
        self.relay.passed = partial(self.sent.add, RELAYED)
        self._early: dict[int, list[Message]] = {}
        """Relayed messages that arrived before their sender's greeting, by sender."""
        self.num_sent: Counter[int] = Counter()
        """Number of messages that this rank has sent to each peer."""
        self.num_heard: Counter[int] = Counter()
        """Number of messages received from each peer."""
        self._leaving: dict[int, int] = {}
        """Peers that have announced their leave, with the number of messages each had sent, until all have arrived."""
        self._parting: tuple[Kind, dict[str, Json]] | None = None
        """Kind and body of the message that announces this rank's own end."""

    @property
    def refusals(self) -> dict[str, Json]:
        """Number of refused messages and connections so far; empty if there are none."""
        counts = {"messages": self.transport.refused, "connections": self.transport.turned_away}
        return dict(counts) if any(counts.values()) else {}

    def advance(self, view: int) -> None:
        """Replaces the view by a newer one: ends the waits of the older view and withdraws its unsent messages.

        Raises:
          ValueError: the number is not higher.
        """
        older = self.mailbox.view
        self.mailbox.advance(view)
        self.transport.withdraw(older)
        self.relay.settle()

    # --- messages ---------------------------------------------------------------------------------------------------

    def send(
        self, payload: Payload, dst: int, tag: Tag, priority: int = 0, *, is_counted: bool = False
    ) -> Pending[None]:
        """Sends a message; done when it has left, see :meth:`farflung.comm.transport.Transport.send`.

        A payload of another device is counted (``is_counted``), then copied to the host first.
        """
        if not is_counted:
            self.sent.add(kind_of(tag.exchange), payload.nbytes, dst)
        if not on_host(payload):
            sent: Pending[None] = Pending()

            def send_staged(host: Pending[Payload]) -> None:
                if host.error is not None:
                    sent.fail(host.error)
                else:
                    sent.follow(self.send(host.result(), dst, tag, priority, is_counted=True))

            self.stage(payload).on_done(send_staged)
            return sent
        if dst in self._left or dst not in self._greeted:
            return failed(PeerLost(dst, "its connection is gone"))
        self.num_sent[dst] += 1
        hop = self.routes.next_hop(dst)
        route = DIRECT if hop == dst else Route(self.rank, dst, priority)
        frames = encode(Kind.DATA, self.mailbox.view, tag, payload, route=route)
        view = CONTROL if of_no_view(tag.exchange) else self.mailbox.view
        return self.transport.send(hop, frames, priority=priority, view=view)

    @override
    def arrived(self, rank: int, message: Message) -> None:
        source, destination, _ = message.route
        is_relayed = message.route != DIRECT and destination == self.rank
        try:
            self._route(rank, message)
        except Unauthorized:
            raise
        except WireError as error:
            self.malformed(source if is_relayed else rank, message.payload.nbytes, str(error))
            raise

    @override
    def malformed(self, rank: int, nbytes: int, why: str) -> None:
        if rank in self._left:
            return
        error = PeerLost(rank, f"refused {nbytes:,} bytes from it: {why}")
        if rank in self._greeted:
            self.say(Kind.ABORT, rank, {"detail": str(error), "rank": rank})
        self._lose(rank, error)
        self._tell_gone(rank, error.detail)
        self.transport.dismiss(rank)

    def _route(self, rank: int, message: Message) -> None:
        """Handles, stores or relays a message."""
        source, destination, _ = message.route
        if message.route == DIRECT:
            self._take(rank, message)
        elif destination != self.rank:
            self._has_greeted(rank)
            self.relay.take(rank, message)
        elif self.routes.relay(source) != rank:
            raise Unauthorized("another rank's message, by a member that does not relay it")
        elif source in self._greeted or message.kind is Kind.HELLO:
            self.waits.hear(source)
            self._take(source, message)
        else:
            self._keep(source, message)

    def _keep(self, rank: int, message: Message) -> None:
        """Stores a message until its sender's greeting, which a relay may deliver later.

        Raises:
          Unauthorized: the sender is not a member, or more than ``max_nbytes`` of its messages are stored.
        """
        if rank not in self._members - self._left:
            raise Unauthorized("a message of a rank that is no member")
        messages = self._early.setdefault(rank, [])
        if sum(stored.payload.nbytes for stored in (*messages, message)) > self.transport.max_nbytes:
            raise Unauthorized("more before a greeting than any message has")
        messages.append(message)

    def _take(self, rank: int, message: Message) -> None:
        """Handles a message from ``rank`` that is addressed to this rank."""
        if message.kind is Kind.HELLO:
            self._hello(rank, json_of(message.payload))
            return
        self._has_greeted(rank)
        if message.kind is Kind.DATA:
            self.num_heard[rank] += 1
            try:
                self.mailbox.deliver(rank, message.tag, message.payload, message.view)
            except Full as error:
                raise WireError(str(error)) from None
            finally:
                self._see_off(rank)
        else:
            self._control(rank, message)

    @override
    def room(self, rank: int, head: Head, nbytes: int) -> Tensor | None:
        if head.kind is not Kind.DATA or head.route != DIRECT or not head.begins_large:
            return None
        return self.mailbox.place(rank, head.tag, head.view, nbytes)

    @override
    def closed(self, rank: int) -> None:
        self._is_gone(rank, CLOSED)
        self._tell_gone(rank, CLOSED)

    def _tell_gone(self, rank: int, why: str) -> None:
        """Reports the loss of a peer to the ranks that reach it through this one; marks the ranks behind it as lost."""
        self._tell_lost(rank, why)
        for relayed_rank in self.routes.behind(rank):
            self._is_gone(relayed_rank, f"rank {rank} is gone, which relayed its messages")

    def _tell_lost(self, rank: int, why: str) -> None:
        """Reports the loss of a peer to the ranks that reach it through this one, behind all its relayed messages."""
        self.relay.lost(rank)
        for receiver in self.routes.relayed_to(rank):
            if receiver in self.present():
                body: dict[str, Json] = {"rank": rank, "token": self.routes.token(rank), "detail": why}
                self.say(Kind.LOST, receiver, body, last=True)

    @override
    def denied(self, rank: int) -> None:
        if rank not in self._greeted:
            self.end(
                ProtocolError(f"rank {rank} does not accept this replica's key: it was given another list")
            )

    def _hello(self, rank: int, body: dict[str, Any]) -> None:
        if body.get("rank") != rank:
            raise Unauthorized("a greeting with another rank as its source")
        if self.routes.comes_from(rank) and self.routes.relay(rank) is None:
            self._greet(rank)
        if self._parting is not None:
            kind, parting = self._parting
            self.say(kind, rank, {**parting, "behind": self.num_sent[rank]}, last=True)
        error = self._unlike(rank, body.get("settings"))
        if error is not None and rank in self._late:
            self.say(Kind.ABORT, rank, {"detail": str(error), "rank": rank})
            self._tell_lost(rank, str(error))
            self.dismiss(rank, error)
            return
        self._greeted.add(rank)
        for relayed_rank in self.routes.behind(rank):
            self._greet(relayed_rank)
        if error is not None:
            self.end(error)
        self._expect()
        if not self.missing():
            self.ready.set(None)
        if rank in self._late:
            self.mailbox.welcome(rank)
            self._late[rank].set(None)
        for message in self._early.pop(rank, ()):
            self._take(rank, message)

    def _control(self, rank: int, message: Message) -> None:
        body = json_of(message.payload)
        if message.kind is Kind.LEAVE:
            num_sent = body.get("behind")
            if not isinstance(num_sent, int):
                raise WireError("a leave without the number of messages sent before it")
            self._leaving[rank] = num_sent
            self._see_off(rank)
        elif message.kind is Kind.LOST:
            self._hear_lost(rank, body)
        elif message.kind is Kind.WAITING:
            self.waits.hear_report(rank, body)
        elif message.kind is Kind.ABORT:
            failed_rank, detail = body.get("rank"), str(body.get("detail"))
            if failed_rank == rank:
                self._lose(rank, PeerFailed(rank, detail))
            elif self.is_whole and isinstance(failed_rank, int) and failed_rank != self.rank:
                self._lose(rank, PeerLost(failed_rank, f"rank {rank} says: {detail}"))
            else:
                self._lose(rank, PeerLost(rank, f"it left, saying: {detail}"))

    def _see_off(self, rank: int) -> None:
        """Ends a peer's membership once it has announced its leave and every message that it sent has arrived."""
        if rank in self._leaving and self.num_heard[rank] >= self._leaving[rank]:
            self._leaves(rank)

    def _leaves(self, rank: int) -> None:
        del self._leaving[rank]
        self._left.add(rank)
        self.mailbox.fail_from(rank, PeerLost(rank, self.left))

    def _is_gone(self, rank: int, why: str) -> None:
        """Ends the membership of an unreachable peer: it has left if it announced its leave, and is lost otherwise."""
        if rank in self._leaving:
            self._leaves(rank)
        elif rank not in self._left:
            self._lose(rank, PeerLost(rank, why))

    def _hear_lost(self, relay: int, body: Mapping[str, Any]) -> None:
        """Handles a relay's report that a rank behind it is lost."""
        rank = body.get("rank")
        if not self.is_whole and isinstance(rank, int) and self.routes.relay(rank) != relay:
            return  # it has another route since
        if not isinstance(rank, int) or self.routes.relay(rank) != relay:
            raise Unauthorized("a loss told by a member that does not relay")
        if body.get("token") == self.routes.token(rank):
            self._is_gone(rank, f"rank {relay}, which relays its messages, says: {body.get('detail')}")

    @override
    def _give_up(self, rank: int) -> None:
        self._lose(rank, PeerLost(rank, "its connection was given up"))
        self._tell_gone(rank, "its connection was given up")
        self.transport.dismiss(rank)

    @override
    def _reset(self, rank: int) -> None:
        self.relay.lost(rank)
        self._early.pop(rank, None)
        self._leaving.pop(rank, None)
        self.waits.forget(rank)
        self.num_heard[rank] = self.num_sent[rank] = 0

    @override
    def _greet(self, rank: int) -> None:
        """Sends the greeting: rank, settings, and through a relay the receiver's token."""
        body: dict[str, Json] = {"rank": self.rank, "settings": self._settings}
        if self.routes.relay(rank) is not None:
            body["to"] = self.routes.token(rank)
        self.say(Kind.HELLO, rank, body, last=True)

    def say(self, kind: Kind, rank: int, body: Mapping[str, Json], *, last: bool = False) -> None:
        """Sends a control message to a member, ahead of all queued messages, or with ``last`` behind them."""
        text = torch.frombuffer(bytearray(json.dumps(body).encode()), dtype=torch.uint8)
        hop = self.routes.next_hop(rank)
        route = DIRECT if hop == rank else Route(self.rank, rank, LAST if last else FIRST)
        frames = encode(kind, self.mailbox.view, _CONTROL, Payload((text,)), route=route)
        try:
            self.transport.say(hop, frames, last=last)
        except PeerLost as error:
            self._lose(hop, error)

    # --- the end ----------------------------------------------------------------------------------------------------

    def end(self, error: BaseException) -> None:
        """Ends the view: fails all waits, pending and later, with the first error."""
        if self.lost is None:
            self.lost = error
        self.mailbox.end(self.lost)
        self.ready.fail(self.lost)
        self.waits.end(self.lost)

    def _lose(self, rank: int, error: BaseException) -> None:
        """Marks a member as lost: ends the view if it needs all members, or else the waits for that member."""
        self.dismiss(rank, error)
        self._left.add(rank)
        if self.is_whole:
            self.end(error)
        else:
            self.mailbox.fail_from(rank, error)

    def leave(self, error: BaseException | None, *, relays_s: float = PARTING_S) -> None:
        """Announces to all peers that this rank leaves, or the error on which it ends.

        Unsent messages are sent first, or withdrawn if there is an error.

        Args:
          error: Error on which the rank ends; None if it leaves normally.
          relay_idle_s: After a normal leave, seconds without a relayed message after which relaying ends.
        """
        remaining_ranks = self._addresses.keys() - self._left
        if error is None and self.lost is None:
            self._send_all()
        else:
            self.transport.withdraw(self.mailbox.view)
        body: dict[str, Json]
        if error is None:
            kind, body = Kind.LEAVE, {}
        elif isinstance(error, (PeerLost, PeerFailed, DeadlinePassed)):
            kind, body = Kind.ABORT, {"detail": str(error), "rank": error.rank}
        else:
            detail = str(error) if isinstance(error, FarflungError) else f"{type(error).__name__}: {error}"
            kind, body = Kind.ABORT, {"detail": detail, "rank": self.rank}
        self._parting = (kind, body)
        for rank in remaining_ranks:
            if rank in self._greeted or self.routes.goes_to(rank):
                self.say(kind, rank, {**body, "behind": self.num_sent[rank]}, last=True)
        # Wait for the peers to leave before closing: a message to a peer that closes at the same moment would wait for
        # a reconnection, and a peer that has not greeted yet would never learn the error.
        end_s = self.now() + PARTING_S
        while (remaining_s := end_s - self.now()) > 0:
            if not self._addresses.keys() - self._left and not self.transport.held_nbytes:
                break
            self.transport.poll(remaining_s)
        if error is None:
            self._go_on_relaying(relays_s)

    def _go_on_relaying(self, patience_s: float) -> None:
        """Relays until no pair needs it, or no message has been relayed for ``patience_s`` seconds."""
        end_s, num_relayed = self.now() + patience_s, self.relay.count
        while self.relay.serves(self._left) and (remaining_s := end_s - self.now()) > 0:
            self.transport.poll(remaining_s)
            if self.relay.count != num_relayed:
                end_s, num_relayed = self.now() + patience_s, self.relay.count

    def _send_all(self) -> None:
        """Sends all queued messages; gives up if no byte leaves for :data:`STUCK_S` seconds."""
        end_s, queued_nbytes = self.now() + STUCK_S, self.transport.held_nbytes
        while queued_nbytes and self.lost is None and (remaining_s := end_s - self.now()) > 0:
            self.transport.poll(remaining_s)
            if self.transport.held_nbytes != queued_nbytes:
                end_s, queued_nbytes = self.now() + STUCK_S, self.transport.held_nbytes

    def close(self) -> None:
        """Closes the transport; while members are present, sends queued messages first, for a few seconds at most."""
        self.transport.close(linger=bool(self.present()))
