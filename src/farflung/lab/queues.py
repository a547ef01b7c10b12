"""What packets meet between the nodes: queues, delay and loss, as a pure calculation that is told the time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from farflung.faults import Condition
from farflung.network import NetworkProfile, Trace, Wiring
from farflung.network.link import Capacity, both_lose
from farflung.noise import uniform

__all__ = ["BUFFER_S", "WIRE_OVER_PAYLOAD", "Queues", "finish_s"]

WIRE_OVER_PAYLOAD = 1500 / 1448
"""A profile's bandwidth is what the payload gets; a full TCP segment of 1448 bytes is 1500 with its headers."""

BUFFER_S = 1.0
"""How much of one way a queue holds, in seconds of its capacity; what comes to a full queue is lost."""
SEGMENT_BITS = 8.0 * 1500
BURST_S = 0.01
"""Packets of a way that follow one another within this time have the same jitter, as those of one message have in
virtual time; drawn for each by itself and kept in order, the delay would always be near its largest."""
LEAST_BUFFER_NBYTES = 256 * 1024
"""How much of one way any queue holds at least."""


@dataclass(slots=True)
class _Way:
    """From one node to another."""

    src: int
    dst: int
    uses: tuple[tuple[int, int], ...]
    latency_s: float
    jitter_s: float
    loss: float
    condition: Condition = field(default_factory=Condition)
    ceiling: int | None = None
    """The queue of its condition's bandwidth, the last in ``uses``, once it has had one."""
    sent: int = 0
    bursts: int = 0
    swing: float = 0.0
    last_left: float = -math.inf
    last_arrival: float = 0.0


@dataclass(slots=True)
class _Packet:
    way: _Way
    bits: float
    data: bytes
    first_s: float
    """When its first segment came to where it is."""
    lost: bool
    """On the way to its node, after all queues: it takes its part of the bandwidth before."""
    hop: int = 0


class _Queue:
    r"""What waits for one capacity; each way gets an equal share of it, a way's own packets stay in order.

    Start-time fair queueing: a packet's tag is the end of the one before it on its way, or the tag in service where
    that is larger; the smallest tag is served next.

    References: Goyal, Vin & Cheng 1996. RFC 8290 (fq_codel) shares a link alike on today's Linux and its Wi-Fi.
    """

    __slots__ = ("_ends", "_held", "_limit", "_sequence", "_tag", "_waiting", "capacity", "free_s", "serving")

    def __init__(self, capacity: Capacity, *, fair: bool) -> None:
        self.serving: _Packet | None = None
        self.free_s = -math.inf
        """When the packet in service is through."""
        self.set_capacity(capacity)
        self._waiting: list[tuple[float, int, _Packet]] = []
        self._held: dict[tuple[int, int], float] = {}
        self._ends: dict[tuple[int, int], float] | None = {} if fair else None
        self._tag = 0.0
        self._sequence = 0

    def set_capacity(self, capacity: Capacity) -> None:
        """From the next packet on; the one in service goes on as it began."""
        self.capacity = capacity
        largest = max(capacity.bandwidth_bps) if isinstance(capacity, Trace) else capacity
        self._limit = max(BUFFER_S * largest, 8.0 * LEAST_BUFFER_NBYTES)

    def add(self, packet: _Packet, bits: float) -> bool:
        """Whether there was room for it."""
        key = (packet.way.src, packet.way.dst)
        held = self._held.get(key, 0.0) + bits
        if held > self._limit:
            return False
        self._held[key] = held
        tag = 0.0
        if self._ends is not None:
            tag = max(self._tag, self._ends.get(key, 0.0))
            self._ends[key] = tag + bits
        self._sequence += 1
        heapq.heappush(self._waiting, (tag, self._sequence, packet))
        return True

    def next(self) -> _Packet | None:
        """Takes the packet to be served now."""
        if not self._waiting:
            self.serving = None
            return None
        self._tag, _, self.serving = heapq.heappop(self._waiting)
        return self.serving

    def done(self, packet: _Packet, bits: float) -> None:
        """A packet has been served."""
        self._held[packet.way.src, packet.way.dst] -= bits


class Queues:
    """All capacities of a profile as queues that packets pass one after another, then the delay of their way.

    Hand over packets with :meth:`arrive`; at :meth:`due`, take those that are through from :meth:`leave`. Which
    capacities a packet uses, and how often, is what :class:`farflung.network.Wiring` says, as in virtual time.

    Args:
      profile: with its number of nodes.
      seed: of jitter and loss.
      fair: whether ways that share a capacity get equal shares of it; otherwise first come, first served.
    """

    def __init__(self, profile: NetworkProfile, seed: int = 0, *, fair: bool = True) -> None:
        self._fair = fair
        wiring, self.nodes, self._seed = Wiring(profile, loses=False), profile.node_count, seed
        self._ways: dict[tuple[int, int], _Way] = {}
        for src in range(self.nodes):
            for dst in range(self.nodes):
                if src != dst:
                    path = wiring.path(src, dst)
                    uses = tuple((use.resource, use.times) for use in path.uses)
                    loss = profile.link(src, dst).loss
                    self._ways[src, dst] = _Way(src, dst, uses, path.latency_s, path.jitter_s, loss)
        self._queues = [_Queue(capacity, fair=fair) for capacity in wiring.capacities]
        self._events: list[tuple[float, int, int, _Packet | None]] = []
        self._sequence = 0
        self.begin_s = math.inf
        """When traces begin, and jitter and loss; before, each trace is at its first value."""
        self.loses = False
        """Whether there is a profile's loss before that, to be measured."""
        self.early_s = 0.0
        """How much sooner than modelled a packet leaves, for what handing it over takes."""
        self.lost = 0
        """Packets lost: dropped by a full queue, by a profile's loss or in a cut."""

    def change(self, src: int, dst: int, condition: Condition) -> None:
        """What happens to a way from here on; packets that wait in a queue meet it too."""
        way = self._ways[src, dst]
        way.condition = condition
        if way.ceiling is not None:
            self._queues[way.ceiling].set_capacity(condition.bandwidth_bps)
        elif condition.bandwidth_bps < math.inf:
            way.ceiling = len(self._queues)
            way.uses = (*way.uses, (way.ceiling, 1))
            self._queues.append(_Queue(condition.bandwidth_bps, fair=self._fair))

    def arrive(self, now: float, src: int, dst: int, wire_nbytes: int, data: bytes) -> None:
        """A packet sets out.

        Args:
          now: the time, in seconds.
          src: the node that sends it.
          dst: the node it is for.
          wire_nbytes: its length with all headers; of a large one, of all the segments it stands for.
          data: what :meth:`leave` hands on.
        """
        way = self._ways[src, dst]
        way.sent += 1
        condition = way.condition
        loss = both_lose(way.loss, condition.loss)
        drawn = loss and (self.loses or now >= self.begin_s)
        lost = condition.cut or bool(drawn and uniform(self._seed, 1, src, dst, way.sent) < loss)
        self.lost += lost
        if not condition.cut:
            self._go_on(now, _Packet(way, 8.0 * wire_nbytes, data, now, lost))

    def due(self) -> float:
        """When :meth:`leave` is to be called next; infinity where nothing is on its way."""
        return self._events[0][0] if self._events else math.inf

    def leave(self, now: float) -> Iterator[tuple[int, bytes]]:
        """The packets that have arrived by ``now``, and where, in order of time."""
        events = self._events
        while events and events[0][0] <= now:
            t, _, place, packet = heapq.heappop(events)
            if packet is None:
                self._served(t, place)
            elif packet.way.condition.cut:
                self.lost += 1
            else:
                yield place, packet.data

    def _go_on(self, t: float, packet: _Packet) -> None:
        """To its next queue, or through its delay where it has passed them all."""
        way = packet.way
        if packet.hop < len(way.uses):
            number, times = way.uses[packet.hop]
            queue = self._queues[number]
            if not queue.add(packet, packet.bits * times):
                self.lost += not packet.lost
            elif queue.serving is None:
                self._serve(t, number, queue)
            return
        if packet.lost:
            return
        if way.jitter_s and t >= self.begin_s and t > way.last_left + BURST_S:
            way.bursts += 1
            way.swing = 2.0 * uniform(self._seed, 2, way.src, way.dst, way.bursts) - 1.0
        way.last_left = t
        delay = way.latency_s + way.jitter_s * way.swing
        way.last_arrival = max(t + max(0.0, delay - self.early_s), way.last_arrival)
        self._push(way.last_arrival, way.dst, packet)

    def _serve(self, t: float, number: int, queue: _Queue) -> None:
        """A large packet's segments are passed on one by one: while its last ones arrive, its first are through."""
        packet = queue.next()
        if packet is None:
            return
        bits = packet.bits * packet.way.uses[packet.hop][1] / WIRE_OVER_PAYLOAD
        begin = max(packet.first_s, queue.free_s)
        takes, share = self._takes_s(queue.capacity, begin, bits), min(1.0, SEGMENT_BITS / packet.bits)
        packet.first_s = begin + share * takes
        queue.free_s = max(begin + takes, t + share * takes)
        self._push(queue.free_s, number, None)

    def _takes_s(self, capacity: Capacity, begin: float, bits: float) -> float:
        if not isinstance(capacity, Trace):
            return bits / capacity
        if begin < self.begin_s:
            return bits / (capacity.at(0.0) or math.inf)
        return self.begin_s + finish_s(capacity, begin - self.begin_s, bits) - begin

    def _served(self, t: float, number: int) -> None:
        queue = self._queues[number]
        packet = queue.serving
        assert packet is not None
        queue.done(packet, packet.bits * packet.way.uses[packet.hop][1])
        self._serve(t, number, queue)
        packet.hop += 1
        self._go_on(t, packet)

    def _push(self, t: float, place: int, packet: _Packet | None) -> None:
        """An event: without a packet, that the first in queue ``place`` is through; else that it is at that node."""
        self._sequence += 1
        heapq.heappush(self._events, (t, self._sequence, place, packet))


def finish_s(trace: Trace, begin_s: float, bits: float) -> float:
    """When bits that begin at a time have passed at the speed of a trace."""
    t = begin_s
    while True:
        bps, until = trace.at(t), trace.next_change(t)
        if bits <= bps * (until - t):
            return t + bits / bps if bits else t
        bits -= bps * (until - t)
        t = until
