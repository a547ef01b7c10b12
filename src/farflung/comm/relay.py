"""Passes messages on between members who reach each other through this one alone.

Nothing is taken on trust: the source of a message has to be whom the connection has proved, and this member the relay
of the two. Greetings are held until both of a pair have greeted, and meant each other: by then both are there.
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
"""The most that a greeting may take which is held."""


class Relay:
    """What one member passes on; see :class:`farflung.comm.routes.Routes` for between whom.

    Args:
      transport: carries it.
      routes: of the view.
      size: number of members.
    """

    def __init__(self, transport: Transport, routes: Routes, size: int) -> None:
        self._transport, self._routes, self._size = transport, routes, size
        self.passed: Callable[[int, int], object] = lambda *_: None
        """Told of the payload bytes of each message that is passed on, and whom it is for."""
        self._held: dict[tuple[int, int], tuple[Message, object]] = {}
        """Greetings, by source and destination, and whom of that rank they mean."""
        self._parted: dict[frozenset[int], bool] = {}
        """Whether one of a pair that had met is gone."""
        self.count = 0
        """Messages passed on so far."""

    def take(self, rank: int, message: Message) -> None:
        """A member's message that is for another.

        Raises:
          Unauthorized: it is not for this replica to pass on.
          WireError: it is malformed.
        """
        source, destination, _ = message.route
        if source != rank:
            raise Unauthorized("a message under another's name")
        pair = frozenset((source, destination))
        if message.kind is Kind.HELLO:
            self._hold(message)
        elif pair not in self._parted:
            raise Unauthorized("a message between two for whom nothing is relayed here")
        elif not self._parted[pair]:
            self._pass_on(message)

    def lost(self, rank: int) -> None:
        """A member is gone: what is for it goes nowhere, until it greets anew."""
        self._held = {ends: greeting for ends, greeting in self._held.items() if ends[0] != rank}
        self._parted.update({pair: True for pair in self._parted if rank in pair})

    def serves(self, gone: Collection[int]) -> bool:
        """Whether there are two who have met through this replica, neither of whom is among those that are gone."""
        return any(not parted and pair.isdisjoint(gone) for pair, parted in self._parted.items())

    def _hold(self, message: Message) -> None:
        """Keeps a greeting until the other has come."""
        source, destination, _ = message.route
        known = destination in self._routes
        if known and self._routes.between(source, destination) != self._transport.me.rank:
            raise Unauthorized("a greeting between two for whom nothing is relayed here")
        if destination >= self._size or message.payload.nbytes > GREETING_NBYTES:
            raise Unauthorized("a greeting for nobody of this run, or larger than any")
        self._held[source, destination] = message, json_of(message.payload).get("to")
        both = ((destination, source), (source, destination))
        if known and all(map(self._means_who_is_there, both)):
            self._parted[frozenset(both[0])] = False
            for greeting, _ in [self._held.pop(ends) for ends in both]:
                self._pass_on(greeting)

    def _means_who_is_there(self, ends: tuple[int, int]) -> bool:
        """Whether one of these has greeted the other, and none that had its rank before."""
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
        with suppress(PeerLost):  # which is told when its connection closes
            self._transport.say(destination, frames, last=priority != FIRST)
