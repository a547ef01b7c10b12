"""Messages that share capacities: each message in transmission is a flow in a :class:`farflung.network.Fabric`."""

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
"""Bandwidth that stands for no limit; a message takes less time than the clock can resolve."""
AFTER_ALL_ELSE = 1
"""Clock priority that computes rates after all flows of one time have begun or ended."""
PIECES_AHEAD = 2
"""Pieces of a message that no other overtakes: one in transmission, and one unsent in the kernel."""


@dataclass(slots=True)
class _Message:
    """Message from one rank to another; bits are those that each connection of its queue carries.

    Args:
      remaining_bits: Bits that no flow has taken yet.
      total_bits: Bits of the message.
      on_arrival: Called when the last bit arrives.
      departure: Completes when the last bit has left.
    """

    bits: float
    whole: float
    arrived: Callable[[float], None]
    left: Pending[None] = field(default_factory=Pending)
    room: float = math.inf
    """Bits that may leave before a more urgent message does."""
    began_s: float = 0.0
    """Time at which its first bit left."""


_Queued: TypeAlias = tuple[int, int, _Message]
"""Priority, number and message."""


@dataclass(slots=True)
class _Line:
    """Messages of one rank to another, sent one at a time over all connections of the pair."""

    path: Path
    src: int
    dst: int
    piece: int
    """Bytes of a piece."""
    tcp: Tcp | None
    """Congestion state of each connection, if rates are found by TCP."""
    queue: list[_Queued] = field(default_factory=list)
    """Heap of messages."""
    sending: _Queued | None = None
    flow: Flow | None = None
    """Current flow in the network."""
    sent: int = 0
    passed: float = 0.0
    """Bits of the messages that have left."""
    last_arrival: float = 0.0


class Flows:
    """Messages that share links, node capacities and media max-min fairly.

    Messages of one sender to one receiver leave one at a time, by priority and then in their order. If a more urgent
    message comes, :data:`COMMITTED_PIECES` pieces of the current one leave first, and its remainder follows later.
    Messages arrive in the order in which they have left; a delay never puts one before its predecessor.

    Args:
      clock: Virtual clock.
      wiring: Wiring of the network.
      seed: Seed of the jitter.
      is_encrypted: Connections are encrypted.
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
        """Limits the bandwidth of all messages from one rank to another, from now on."""
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
        messages = [entry[2] for entry in (*line.queue, *([] if line.sending is None else [line.sending]))]
        in_flight = 0.0 if line.flow is None else line.flow.left_at(self._clock.now())
        bits = line.passed + sum(message.whole - message.bits for message in messages) - in_flight
        return int(bits * line.path.connections / 8)

    def _start(self, line: _Line) -> None:
        """Starts the most urgent messages of a queue; those that take no time leave at once."""
        while line.queue and line.sending is None:
            line.sending = heappop(line.queue)
            self._go_on(line)

    def _go_on(self, line: _Line) -> None:
        """Continues the current message of a queue, unless it has left or has to yield."""
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
        """Starts a flow of as many bits as the connection sends before an acknowledgement."""
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
        """Limits the current message to committed pieces and data in flight, so that an urgent one follows."""
        if message.room < math.inf:
            return
        time_s, piece = self._clock.now(), 8.0 * line.piece
        in_flight_bits = 0.0 if line.flow is None else line.flow.left_at(time_s)
        sent_bits = message.whole - message.bits - in_flight_bits
        room_bits = (sent_bits // piece + PIECES_AHEAD) * piece - sent_bits
        if in_flight_bits > room_bits and line.flow is not None and (line.tcp is None or line.tcp.filled):
            self._fabric.shorten(line.flow, time_s, room_bits)
            message.bits += in_flight_bits - room_bits
            if line.tcp is not None:
                line.tcp.hold_back(in_flight_bits - room_bits)
            self._settle_soon()
        message.room = max(0.0, room_bits - in_flight_bits)

    def _passed(self, line: _Line) -> None:
        """Handles the end of a queue's flow."""
        line.flow = None
        departure_s = self._clock.now() if line.tcp is None else line.tcp.passed(self._clock.now())
        if departure_s > self._clock.now():
            self._clock.at(departure_s, partial(self._continue, line))
        else:
            self._continue(line)

    def _continue(self, line: _Line) -> None:
        self._go_on(line)
        self._start(line)

    def _leave(self, line: _Line, message: _Message) -> None:
        """Finishes a message whose last bit has left, and schedules its arrival."""
        line.sending = None
        delay = line.path.latency_s
        if line.path.jitter_s:
            random = uniform(self._seed, line.src, line.dst, line.sent)
            delay += line.path.jitter_s * (2.0 * random - 1.0)
        if line.tcp is not None and line.path.loss:
            lost, repeat = (uniform(self._seed, line.src, line.dst, line.sent, index) for index in (1, 2))
            bits, duration_s = message.whole * line.path.connections, self._clock.now() - message.began_s
            path, is_last = line.path, not line.queue
            delay += repaired_s(bits, duration_s, path.round_trip_s, path.loss, (lost, repeat), last=is_last)
        line.sent += 1
        line.passed += message.whole
        arrival_s = line.last_arrival = max(self._clock.now() + delay, line.last_arrival)
        self._clock.at(arrival_s, partial(message.arrived, arrival_s))
        message.left.set(None)

    def _settle_soon(self) -> None:
        if not self._settling:
            self._settling = True
            self._clock.at(self._clock.now(), self._settle, AFTER_ALL_ELSE)

    def _settle(self) -> None:
        self._settling = False
        self._fabric.settle(self._clock.now())
        next_s = self._fabric.due()
        if next_s < self._wakes_at:
            self._wakes_at = next_s
            self._clock.at(next_s, self._wake)

    def _wake(self) -> None:
        time_s = self._clock.now()
        if time_s < self._wakes_at:
            return  # an earlier wake-up was scheduled since, and has run
        self._wakes_at = math.inf
        for flow in self._fabric.ended(time_s):
            self._passed(self._flying.pop(flow))
        self._settle_soon()
