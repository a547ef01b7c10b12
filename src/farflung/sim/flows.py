"""Messages that share capacities: what leaves of one is a flow in a :class:`farflung.network.Fabric`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from typing import TypeAlias

from farflung.comm.framing import piece_nbytes, wire_nbytes
from farflung.network import Fabric, Flow, Path, Tcp, Use, Wiring, repaired_s
from farflung.network.link import Capacity, map_capacity, mean_capacity
from farflung.noise import uniform
from farflung.sim.clock import VirtualClock
from farflung.tasks import Pending

__all__ = ["Flows"]

UNLIMITED_BPS = 1e21
"""At which a message takes less time than the clock can tell, in the place of a limit that was lifted."""
AFTER_ALL_ELSE = 1
"""Priority on the clock: rates are worked out once all that begins or ends at one time has done so."""
PIECES_AHEAD = 2
"""Pieces of a message that no other overtakes: the one that leaves, and the one that the kernel has unsent."""


@dataclass(slots=True)
class _Message:
    """Bits are those that each connection of its line carries.

    Args:
      bits: that no flow has taken yet.
      whole: all of them.
      arrived: called when the last one is there.
      left: done when it has left.
    """

    bits: float
    whole: float
    arrived: Callable[[float], None]
    left: Pending[None] = field(default_factory=Pending)
    room: float = math.inf
    """How many may leave before a more urgent message does."""
    began_s: float = 0.0
    """When its first bit left."""


_Queued: TypeAlias = tuple[int, int, _Message]
"""Priority, number, and the message."""


@dataclass(slots=True)
class _Line:
    """The messages of one rank to another, of which one leaves at a time, over all connections of the pair."""

    path: Path
    src: int
    dst: int
    piece: int
    """Bytes of a piece."""
    tcp: Tcp | None
    """What each connection knows of its rate, where it has to find it."""
    queue: list[_Queued] = field(default_factory=list)
    """A heap."""
    sending: _Queued | None = None
    flow: Flow | None = None
    """What the network takes of it now."""
    sent: int = 0
    passed: float = 0.0
    """Bits of the messages that have left."""
    last_arrival: float = 0.0


class Flows:
    """Messages share links, nodes' capacities and media max-min fairly.

    Those of one sender to one receiver leave one at a time: the smallest priority first, equal ones in their order.
    Where a more urgent message comes, :data:`PIECES_AHEAD` pieces of the one under way still leave before it, and the
    rest follows. They arrive in the order in which they have left; a delay never puts one before its predecessor.

    Args:
      clock: virtual time.
      wiring: of the network.
      seed: of the jitter.
      sealed: whether connections are encrypted.
    """

    def __init__(self, clock: VirtualClock, wiring: Wiring, seed: int, *, sealed: bool = False) -> None:
        self._clock, self._wiring, self._seed, self._sealed = clock, wiring, seed, sealed
        self._fabric = Fabric(wiring.capacities)
        self._sent = 0
        self._lines: dict[tuple[int, int], _Line] = {}
        self._flying: dict[Flow, _Line] = {}
        self._ceilings: dict[tuple[int, int], Use] = {}
        self._settling = False
        self._wakes_at = math.inf

    def send(
        self, src: int, dst: int, nbytes: int, priority: int, arrived: Callable[[float], None]
    ) -> Pending[None]:
        line = self._lines.get((src, dst)) or self._laid(src, dst)
        bits = 8.0 * wire_nbytes(nbytes, line.piece, sealed=self._sealed) / line.path.connections
        message = _Message(bits, bits, arrived)
        self._sent += 1
        heappush(line.queue, (priority, self._sent, message))
        if line.sending is None:
            self._start(line)
        elif priority < line.sending[0]:
            self._give_way(line, line.sending[2])
        return message.left

    def _laid(self, src: int, dst: int) -> _Line:
        path = self._wiring.path(src, dst)
        capacities = [mean_capacity(self._wiring.capacities[use.resource]) for use in path.uses]
        if path.connections > 1:
            path = replace(
                path, uses=tuple(Use(use.resource, use.times * path.connections) for use in path.uses)
            )
        if (src, dst) in self._ceilings:
            path = replace(path, uses=(*path.uses, self._ceilings[src, dst]))
        tcp = None if path.congestion is None else Tcp(path.congestion, path.round_trip_s)
        piece = piece_nbytes(min(capacities, default=math.inf))
        line = self._lines[src, dst] = _Line(path, src, dst, piece, tcp)
        return line

    def limit(self, src: int, dst: int, capacity: Capacity) -> None:
        """From now on all messages of one rank to another together get no more bandwidth than this."""
        capacity = map_capacity(capacity, lambda bps: min(bps, UNLIMITED_BPS))
        ceiling = self._ceilings.get((src, dst))
        if ceiling is not None:
            self._fabric.set_capacity(ceiling.resource, capacity)
        else:
            connections = self._wiring.path(src, dst).connections
            ceiling = self._ceilings[src, dst] = Use(len(self._wiring.capacities), connections)
            self._wiring.capacities.append(capacity)
            line = self._lines.get((src, dst))
            if line is not None:
                line.path = replace(line.path, uses=(*line.path.uses, ceiling))
                if line.flow is not None:
                    self._fabric.use(line.flow, ceiling)
        self._settle_soon()

    def carried_nbytes(self, src: int, dst: int) -> int:
        """Returns the bytes that have left one rank for another so far."""
        line = self._lines.get((src, dst))
        if line is None:
            return 0
        begun = [entry[2] for entry in (*line.queue, *([] if line.sending is None else [line.sending]))]
        flying = 0.0 if line.flow is None else line.flow.left_at(self._clock.now())
        bits = line.passed + sum(message.whole - message.bits for message in begun) - flying
        return int(bits * line.path.connections / 8)

    def _start(self, line: _Line) -> None:
        """The most urgent messages of a line go on; what takes no time has left at once."""
        while line.queue and line.sending is None:
            line.sending = heappop(line.queue)
            self._go_on(line)

    def _go_on(self, line: _Line) -> None:
        """More of the message that leaves, or none if it has left or has to give way."""
        assert line.sending is not None
        message = line.sending[2]
        if not message.bits:
            self._leave(line, message)
        elif not message.room:
            message.room = math.inf
            heappush(line.queue, line.sending)
            line.sending = None
        elif line.tcp is not None:
            self._clock.at(max(line.tcp.free_s, self._clock.now()), partial(self._fly, line, message))
        else:
            self._flow(line, message, min(message.bits, message.room))

    def _fly(self, line: _Line, message: _Message) -> None:
        """As much of a message sets out as its connection sends before it hears from the other end."""
        assert line.tcp is not None
        if message.bits == message.whole:
            message.began_s = self._clock.now()
        self._flow(line, message, line.tcp.flight(self._clock.now(), min(message.bits, message.room)))

    def _flow(self, line: _Line, message: _Message, bits: float) -> None:
        message.bits -= bits
        message.room -= bits
        if line.path.uses:
            line.flow = self._fabric.start(bits, line.path.uses)
            self._flying[line.flow] = line
            self._settle_soon()
        else:
            self._passed(line)

    def _give_way(self, line: _Line, message: _Message) -> None:
        """A more urgent message follows the pieces that have been handed over, and what is in the network's hands."""
        if message.room < math.inf:
            return
        now, piece = self._clock.now(), 8.0 * line.piece
        left = 0.0 if line.flow is None else line.flow.left_at(now)
        gone = message.whole - message.bits - left
        room = (gone // piece + PIECES_AHEAD) * piece - gone
        if left > room and line.flow is not None and (line.tcp is None or line.tcp.filled):
            self._fabric.shorten(line.flow, now, room)
            message.bits += left - room
            if line.tcp is not None:
                line.tcp.hold_back(left - room)
            self._settle_soon()
        message.room = max(0.0, room - left)

    def _passed(self, line: _Line) -> None:
        """The network has taken all of a line that was under way."""
        line.flow = None
        left = self._clock.now() if line.tcp is None else line.tcp.passed(self._clock.now())
        if left > self._clock.now():
            self._clock.at(left, partial(self._continue, line))
        else:
            self._continue(line)

    def _continue(self, line: _Line) -> None:
        self._go_on(line)
        self._start(line)

    def _leave(self, line: _Line, message: _Message) -> None:
        """The last bit of a message has left."""
        line.sending = None
        delay = line.path.latency_s
        if line.path.jitter_s:
            drawn = uniform(self._seed, line.src, line.dst, line.sent)
            delay += line.path.jitter_s * (2.0 * drawn - 1.0)
        if line.tcp is not None and line.path.loss:
            lost, again = (uniform(self._seed, line.src, line.dst, line.sent, which) for which in (1, 2))
            bits, took_s = message.whole * line.path.connections, self._clock.now() - message.began_s
            path, last = line.path, not line.queue
            delay += repaired_s(bits, took_s, path.round_trip_s, path.loss, (lost, again), last=last)
        line.sent += 1
        line.passed += message.whole
        arrives = line.last_arrival = max(self._clock.now() + delay, line.last_arrival)
        self._clock.at(arrives, partial(message.arrived, arrives))
        message.left.set(None)

    def _settle_soon(self) -> None:
        if not self._settling:
            self._settling = True
            self._clock.at(self._clock.now(), self._settle, AFTER_ALL_ELSE)

    def _settle(self) -> None:
        self._settling = False
        self._fabric.settle(self._clock.now())
        due = self._fabric.due()
        if due < self._wakes_at:
            self._wakes_at = due
            self._clock.at(due, self._wake)

    def _wake(self) -> None:
        now = self._clock.now()
        if now < self._wakes_at:
            return  # an earlier moment has been set since, and has had its turn
        self._wakes_at = math.inf
        for flow in self._fabric.ended(now):
            self._passed(self._flying.pop(flow))
        self._settle_soon()
