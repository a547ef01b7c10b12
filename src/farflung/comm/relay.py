"""Relay of messages between members that cannot connect to each other.

A message is relayed only if its source is the authenticated rank of its connection, and this rank is the relay
of the pair. Greetings are held until both members of a pair have sent one with the other's token.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from farflung.comm.records import CONTROL_VIEW
from farflung.comm.routes import RoutingTable
from farflung.comm.transport import Transport
from farflung.comm.wire import Message, MessageKind, Unauthorized, encode, parse_json

__all__ = ["Relay"]

GREETING_NBYTES = 1 << 20
"""Most bytes of a held greeting."""


class Relay:
    """Relay of messages, for pairs whose relay is this rank by :class:`farflung.comm.routes.RoutingTable`.

    Args:
      transport: Transport of the messages.
      routes: Routes of the view.
      size: World size.
      allow_detours: True if :meth:`serve_pair` may follow a greeting.
    """

    def __init__(
        self, transport: Transport, routes: RoutingTable, size: int, *, allow_detours: bool = False
    ) -> None:
        self._transport = transport
        self._routes = routes
        self._size = size
        self._allows_detours = allow_detours
        self.on_relay: Callable[[int, int], object] = lambda *_: None
        """Callback for each relayed message, with its payload bytes and destination."""
        self._greetings: dict[tuple[int, int], tuple[Message, object]] = {}
        """Held greetings by source and destination, each with the token of the peer that it is for."""
        self._lost_by_pair: dict[frozenset[int], bool] = {}
        """True for a connected pair of which either member is lost."""
        self.num_relayed = 0
        """Number of messages relayed so far."""

    def handle_message(self, rank: int, message: Message) -> None:
        """Handles a message to another rank: relays it, or holds it if it is a greeting.

        Raises:
          Unauthorized: the source is not ``rank``, or this rank does not relay for the pair.
          WireError: the message is malformed.
        """
        source, destination, _ = message.route
        if source != rank:
            raise Unauthorized("a message with another rank as its source")
        pair = frozenset((source, destination))
        if message.kind is MessageKind.HELLO:
            self._hold(message)
        elif pair not in self._lost_by_pair:
            raise Unauthorized("a message between two ranks that this one does not relay for")
        elif not self._lost_by_pair[pair]:
            self._forward(message)

    def serve_pair(self, rank_a: int, rank_b: int) -> None:
        """Starts to relay for a pair whose connection is broken, beginning with its held greetings."""
        self._routes.set_detour(rank_a, rank_b, self._transport.local_peer.rank)
        self._introduce(rank_a, rank_b)

    def prune_greetings(self) -> None:
        """Drops held greetings of pairs that can connect, after a new view has changed their routes."""
        self._greetings = {
            ends: item for ends, item in self._greetings.items() if not self._routes.can_connect(*ends)
        }

    def handle_lost(self, rank: int) -> None:
        """Stops relaying to and from a lost member, until it greets again."""
        self._greetings = {ends: greeting for ends, greeting in self._greetings.items() if ends[0] != rank}
        self._lost_by_pair.update({pair: True for pair in self._lost_by_pair if rank in pair})

    def is_needed(self, present_ranks: Set[int]) -> bool:
        """Returns True if this rank relays for a pair that is present."""
        return any(not lost and pair <= present_ranks for pair, lost in self._lost_by_pair.items())

    def _hold(self, message: Message) -> None:
        """Holds a greeting until its counterpart has arrived, then relays both.

        Raises:
          Unauthorized: this rank does not relay for the pair, the destination is none of the run's ranks, or the
            greeting is too large.
        """
        source, destination, _ = message.route
        is_known, is_relay = destination in self._routes, self._is_relay_of(source, destination)
        if is_known and not is_relay and not self._allows_detours:
            raise Unauthorized("a greeting between two ranks that this one does not relay for")
        if destination >= self._size or message.payload.nbytes > GREETING_NBYTES:
            raise Unauthorized(
                "a greeting to a rank that is not of this run, or a greeting that is too large"
            )
        self._greetings[source, destination] = message, parse_json(message.payload).get("to")
        if is_known and is_relay:
            self._introduce(source, destination)

    def _is_relay_of(self, rank_a: int, rank_b: int) -> bool:
        return self._routes.find_relay(rank_a, rank_b) == self._transport.local_peer.rank

    def _introduce(self, rank_a: int, rank_b: int) -> None:
        """Relays the greetings of two ranks to each other, if both are held and current."""
        pairs = ((rank_b, rank_a), (rank_a, rank_b))
        if all(map(self._is_current, pairs)):
            self._lost_by_pair[frozenset(pairs[0])] = False
            for greeting, _ in [self._greetings.pop(ends) for ends in pairs]:
                self._forward(greeting)

    def _is_current(self, ends: tuple[int, int]) -> bool:
        """Returns True if a greeting of this pair is held and has the token of its current destination."""
        greeting = self._greetings.get(ends)
        return greeting is not None and greeting[1] == self._routes.get_token(ends[1])

    def _forward(self, message: Message) -> None:
        _, destination, priority = message.route
        frames = encode(
            message.kind,
            message.view,
            message.tag,
            message.payload,
            route=message.route,
        )
        self.num_relayed += 1
        view = CONTROL_VIEW
        if message.kind is MessageKind.DATA:
            self.on_relay(message.payload.nbytes, destination)
            view = message.view
        # If the connection is gone, that has been reported.
        self._transport.send(destination, frames, priority=priority, view=view)
