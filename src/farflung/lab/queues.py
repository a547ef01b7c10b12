"""Queues, delay and loss of packets between the nodes, as a pure calculation that is given the time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from farflung.faults import LinkCondition
from farflung.network import BandwidthTrace, NetworkProfile, Wiring
from farflung.network.link import Capacity, combine_losses
from farflung.noise import draw_uniform

__all__ = ["BUFFER_S", "WIRE_OVER_PAYLOAD", "Queues", "compute_finish_s"]

WIRE_OVER_PAYLOAD = 1500 / 1448
"""Bytes on the wire per payload byte of a full TCP segment; a profile's bandwidth is that of the payload."""

BUFFER_S = 1.0
"""Capacity of a queue for one pair, in seconds of bandwidth; packets that reach a full queue are lost."""
SEGMENT_BITS = 8.0 * 1500
BURST_S = 0.01
"""Maximum gap of a pair's packets with equal jitter; else fixed order would keep the delay near its maximum."""
MIN_BUFFER_NBYTES = 256 * 1024
"""Minimum capacity of a queue for one pair."""


@dataclass(slots=True)
class _NodePair:
    """State of an ordered pair of nodes."""

    src: int
    dst: int
    uses: tuple[tuple[int, int], ...]
    latency_s: float
    jitter_s: float
    loss: float
    condition: LinkCondition = field(default_factory=LinkCondition)
    limit_queue: int | None = None
    """Queue of the condition's bandwidth, the last of ``uses``, once the condition has had one."""
    num_packets: int = 0
    num_bursts: int = 0
    jitter_factor: float = 0.0
    last_departure_s: float = -math.inf
    last_arrival_s: float = 0.0


@dataclass(slots=True)
class _Packet:
    pair: _NodePair
    bits: float
    data: bytes
    first_s: float
    """Arrival time of the first segment at the current hop."""
    is_lost: bool
    """True if the packet is lost after all queues; it uses their bandwidth before."""
    hop: int = 0


class _Queue:
    r"""Queue of one capacity, shared equally by pairs of nodes; packets of a pair stay in order.

    Start-time fair queueing: a packet's tag is the end of its pair's previous packet, or the tag in service if
    that is larger. The smallest tag is served next.

    References: Goyal, Vin & Cheng 1996. RFC 8290 (fq_codel) shares a link alike on today's Linux and its Wi-Fi.
    """

    __slots__ = (
        "_finish_tags",
        "_max_bits",
        "_queued_bits",
        "_sequence",
        "_tag",
        "_waiting",
        "capacity",
        "free_s",
        "serving",
    )

    def __init__(self, capacity: Capacity, *, fair: bool) -> None:
        self.serving: _Packet | None = None
        self.free_s = -math.inf
        """Time at which the packet in service is through."""
        self.set_capacity(capacity)
        self._waiting: list[tuple[float, int, _Packet]] = []
        self._queued_bits: dict[tuple[int, int], float] = {}
        self._finish_tags: dict[tuple[int, int], float] | None = {} if fair else None
        self._tag = 0.0
        self._sequence = 0

    def set_capacity(self, capacity: Capacity) -> None:
        """Sets the capacity from the next packet on; the packet in service is not affected."""
        self.capacity = capacity
        largest = max(capacity.bandwidth_bps) if isinstance(capacity, BandwidthTrace) else capacity
        self._max_bits = max(BUFFER_S * largest, 8.0 * MIN_BUFFER_NBYTES)

    def enqueue(self, packet: _Packet, bits: float) -> bool:
        """Adds a packet if the queue has room for it; returns False otherwise."""
        key = (packet.pair.src, packet.pair.dst)
        queued_bits = self._queued_bits.get(key, 0.0) + bits
        if queued_bits > self._max_bits:
            return False
        self._queued_bits[key] = queued_bits
        tag = 0.0
        if self._finish_tags is not None:
            tag = max(self._tag, self._finish_tags.get(key, 0.0))
            self._finish_tags[key] = tag + bits
        self._sequence += 1
        heapq.heappush(self._waiting, (tag, self._sequence, packet))
        return True

    def dequeue(self) -> _Packet | None:
        """Removes the next packet and starts its service."""
        if not self._waiting:
            self.serving = None
            return None
        self._tag, _, self.serving = heapq.heappop(self._waiting)
        return self.serving

    def release(self, packet: _Packet, bits: float) -> None:
        """Releases the room of a served packet."""
        self._queued_bits[packet.pair.src, packet.pair.dst] -= bits


class Queues:
    """Queues for all capacities of a profile, which packets pass in turn before the delay of their pair.

    Hand over packets with :meth:`enqueue`; at :meth:`get_next_time`, take arrived ones from :meth:`pop_arrived`. As
    in virtual time, :class:`farflung.network.Wiring` decides which capacities a packet uses, and how often.

    Args:
      profile: Profile with its number of nodes.
      seed: Seed of jitter and loss.
      fair: Whether pairs that share a capacity get equal shares of it; otherwise first come, first served.
    """

    def __init__(self, profile: NetworkProfile, seed: int = 0, *, fair: bool = True) -> None:
        self._is_fair = fair
        wiring, self.nodes, self._seed = Wiring(profile, apply_loss=False), profile.node_count, seed
        self._pairs: dict[tuple[int, int], _NodePair] = {}
        for src in range(self.nodes):
            for dst in range(self.nodes):
                if src != dst:
                    path = wiring.get_path(src, dst)
                    uses = tuple((use.resource, use.times) for use in path.uses)
                    loss = profile.get_link(src, dst).loss
                    self._pairs[src, dst] = _NodePair(src, dst, uses, path.latency_s, path.jitter_s, loss)
        self._queues = [_Queue(capacity, fair=fair) for capacity in wiring.capacities]
        self._events: list[tuple[float, int, int, _Packet | None]] = []
        self._sequence = 0
        self.begin_s = math.inf
        """Start of traces, jitter and loss; before, each trace keeps its first value."""
        self.is_lossy = False
        """True if packets are lost before ``begin_s``, so that the loss can be measured."""
        self.lead_s = 0.0
        """Time by which a packet leaves early, to compensate for its handover."""
        self.num_lost = 0
        """Number of packets dropped by a full queue, by a profile's loss or in a cut."""

    def set_condition(self, src: int, dst: int, condition: LinkCondition) -> None:
        """Sets the condition of a pair, also for packets that wait in a queue."""
        pair = self._pairs[src, dst]
        pair.condition = condition
        if pair.limit_queue is not None:
            self._queues[pair.limit_queue].set_capacity(condition.bandwidth_bps)
        elif condition.bandwidth_bps < math.inf:
            pair.limit_queue = len(self._queues)
            pair.uses = (*pair.uses, (pair.limit_queue, 1))
            self._queues.append(_Queue(condition.bandwidth_bps, fair=self._is_fair))

    def enqueue(self, time_s: float, src: int, dst: int, wire_nbytes: int, data: bytes) -> None:
        """Enqueues a packet at its sender.

        Args:
          time_s: Current time in seconds.
          src: Sending node.
          dst: Receiving node.
          wire_nbytes: Length with all headers; for a large packet, those of all its segments.
          data: Data that :meth:`pop_arrived` returns.
        """
        pair = self._pairs[src, dst]
        pair.num_packets += 1
        condition = pair.condition
        loss = combine_losses(pair.loss, condition.loss)
        can_lose = loss and (self.is_lossy or time_s >= self.begin_s)
        is_lost = condition.is_cut or bool(
            can_lose and draw_uniform(self._seed, 1, src, dst, pair.num_packets) < loss
        )
        self.num_lost += is_lost
        if not condition.is_cut:
            self._advance_packet(time_s, _Packet(pair, 8.0 * wire_nbytes, data, time_s, is_lost))

    def get_next_time(self) -> float:
        """Returns the time of the next call of :meth:`pop_arrived`; infinity if no packet is in flight."""
        return self._events[0][0] if self._events else math.inf

    def pop_arrived(self, time_s: float) -> Iterator[tuple[int, bytes]]:
        """Yields the packets that have arrived by ``time_s`` with their nodes, in order of time."""
        events = self._events
        while events and events[0][0] <= time_s:
            t, _, target, packet = heapq.heappop(events)
            if packet is None:
                self._finish_service(t, target)
            elif packet.pair.condition.is_cut:
                self.num_lost += 1
            else:
                yield target, packet.data

    def _advance_packet(self, t: float, packet: _Packet) -> None:
        """Forwards a packet to its next queue, or through its delay after the last."""
        pair = packet.pair
        if packet.hop < len(pair.uses):
            number, times = pair.uses[packet.hop]
            queue = self._queues[number]
            if not queue.enqueue(packet, packet.bits * times):
                self.num_lost += not packet.is_lost
            elif queue.serving is None:
                self._serve(t, number, queue)
            return
        if packet.is_lost:
            return
        if pair.jitter_s and t >= self.begin_s and t > pair.last_departure_s + BURST_S:
            pair.num_bursts += 1
            pair.jitter_factor = 2.0 * draw_uniform(self._seed, 2, pair.src, pair.dst, pair.num_bursts) - 1.0
        pair.last_departure_s = t
        delay = pair.latency_s + pair.jitter_s * pair.jitter_factor
        pair.last_arrival_s = max(t + max(0.0, delay - self.lead_s), pair.last_arrival_s)
        self._push(pair.last_arrival_s, pair.dst, packet)

    def _serve(self, t: float, number: int, queue: _Queue) -> None:
        """Serves the next packet, whose first segments go on while its last ones arrive."""
        packet = queue.dequeue()
        if packet is None:
            return
        bits = packet.bits * packet.pair.uses[packet.hop][1] / WIRE_OVER_PAYLOAD
        begin = max(packet.first_s, queue.free_s)
        duration_s = self._compute_duration_s(queue.capacity, begin, bits)
        share = min(1.0, SEGMENT_BITS / packet.bits)
        packet.first_s = begin + share * duration_s
        queue.free_s = max(begin + duration_s, t + share * duration_s)
        self._push(queue.free_s, number, None)

    def _compute_duration_s(self, capacity: Capacity, begin: float, bits: float) -> float:
        if not isinstance(capacity, BandwidthTrace):
            return bits / capacity
        if begin < self.begin_s:
            return bits / (capacity.get_bandwidth(0.0) or math.inf)
        return self.begin_s + compute_finish_s(capacity, begin - self.begin_s, bits) - begin

    def _finish_service(self, time_s: float, queue_index: int) -> None:
        queue = self._queues[queue_index]
        packet = queue.serving
        assert packet is not None
        queue.release(packet, packet.bits * packet.pair.uses[packet.hop][1])
        self._serve(time_s, queue_index, queue)
        packet.hop += 1
        self._advance_packet(time_s, packet)

    def _push(self, t: float, target: int, packet: _Packet | None) -> None:
        """Schedules a packet's arrival at a node, or without a packet the end of service of a queue."""
        self._sequence += 1
        heapq.heappush(self._events, (t, self._sequence, target, packet))


def compute_finish_s(trace: BandwidthTrace, begin_s: float, bits: float) -> float:
    """Returns the time at which bits that begin at ``begin_s`` have passed at the speed of a trace."""
    t = begin_s
    while True:
        bps, change_s = trace.get_bandwidth(t), trace.get_next_change(t)
        if bits <= bps * (change_s - t):
            return t + bits / bps if bits else t
        bits -= bps * (change_s - t)
        t = change_s
