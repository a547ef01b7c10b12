"""Relay of messages between members that cannot connect to each other.

A message is relayed only if its source is the authenticated rank of its connection, and this rank is the relay
of the pair. Greetings are held until both members of a pair have sent one with the other's token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress

from farflung.comm.routes import Routes
from farflung.comm.transport import FIRST, Transport
from farflung.comm.wire import Kind, Message, Unauthorized, encode, json_of
from farflung.errors import PeerLost

__all__ = ["Relay"]

GREETING_NBYTES = 1 << 20
"""Most bytes of a held greeting."""


class Relay:
    """Relay of messages, for pairs whose relay is this rank by :class:`farflung.comm.routes.Routes`.

    Args:
      transport: Transport of the messages.
      routes: Routes of the view.
      size: World size.
      allow_detours: True if :meth:`serve_pair` may follow a greeting.
    """

    def __init__(self, transport: Transport, routes: Routes, size: int, *, detours: bool = False) -> None:
        self._transport, self._routes, self._size, self._detours = transport, routes, size, detours
        self.passed: Callable[[int, int], object] = lambda *_: None
        """Callback for each relayed message, with its payload bytes and destination."""
        self._held: dict[tuple[int, int], tuple[Message, object]] = {}
        """Held greetings by source and destination, each with the token of the peer that it is for."""
        self._parted: dict[frozenset[int], bool] = {}
        """True for a connected pair of which either member is lost."""
        self.count = 0
        """Number of messages relayed so far."""

    def take(self, rank: int, message: Message) -> None:
        """Handles a message to another rank: relays it, or holds it if it is a greeting.

        Raises:
          Unauthorized: the source is not ``rank``, or this rank does not relay for the pair.
          WireError: the message is malformed.
        """
        source, destination, _ = message.route
        if source != rank:
            raise Unauthorized("a message with another rank as its source")
        pair = frozenset((source, destination))
        if message.kind is Kind.HELLO:
            self._hold(message)
        elif pair not in self._parted:
            raise Unauthorized("a message between two ranks that this one does not relay for")
        elif not self._parted[pair]:
            self._pass_on(message)

    def serve(self, one: int, other: int) -> None:
        """Starts to relay for a pair whose connection is broken, beginning with its held greetings."""
        self._routes.detour(one, other, self._transport.me.rank)
        self._introduce(one, other)

    def settle(self) -> None:
        """Drops held greetings of pairs that can connect, after a new view has changed their routes."""
        self._held = {ends: item for ends, item in self._held.items() if not self._routes.connect(*ends)}

    def lost(self, rank: int) -> None:
        """Stops relaying to and from a lost member, until it greets again."""
        self._held = {ends: greeting for ends, greeting in self._held.items() if ends[0] != rank}
        self._parted.update({pair: True for pair in self._parted if rank in pair})

    def serves(self, gone: Collection[int]) -> bool:
        """Returns True if this rank relays for a pair without members in ``lost_ranks``."""
        return any(not lost and pair.isdisjoint(gone) for pair, lost in self._parted.items())

    def _hold(self, message: Message) -> None:
        """Holds a greeting until its counterpart has arrived, then relays both.

        Raises:
          Unauthorized: this rank does not relay for the pair, the destination is none of the run's ranks, or the
            greeting is too large.
        """
        source, destination, _ = message.route
        is_known, is_relay = destination in self._routes, self._serves(source, destination)
        if is_known and not is_relay and not self._detours:
            raise Unauthorized("a greeting between two ranks that this one does not relay for")
        if destination >= self._size or message.payload.nbytes > GREETING_NBYTES:
            raise Unauthorized(
                "a greeting to a rank that is not of this run, or a greeting that is too large"
            )
        self._held[source, destination] = message, json_of(message.payload).get("to")
        if is_known and is_relay:
            self._introduce(source, destination)

    def _serves(self, one: int, other: int) -> bool:
        return self._routes.between(one, other) == self._transport.me.rank

    def _introduce(self, one: int, other: int) -> None:
        """Relays the greetings of two ranks to each other, if both are held and current."""
        pairs = ((other, one), (one, other))
        if all(map(self._is_current, pairs)):
            self._parted[frozenset(pairs[0])] = False
            for greeting, _ in [self._held.pop(ends) for ends in pairs]:
                self._pass_on(greeting)

    def _is_current(self, ends: tuple[int, int]) -> bool:
        """Returns True if a greeting of this pair is held and has the token of its current destination."""
        greeting = self._held.get(ends)
        return greeting is not None and greeting[1] == self._routes.token(ends[1])

    def _pass_on(self, message: Message) -> None:
        _, destination, priority = message.route
        frames = encode(
            message.kind,
            message.view,
            message.tag,
            message.payload,
            route=message.route,
        )
        self.count += 1
        if message.kind is Kind.DATA:
            self.passed(message.payload.nbytes, destination)
            self._transport.send(destination, frames, priority=priority, view=message.view)
            return
        with suppress(PeerLost):  # the loss is reported when the connection closes
            self._transport.say(destination, frames, last=priority != FIRST)
