"""Messages that share capacities: each message in transmission is a flow in a :class:`farflung.network.Fabric`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from typing import TypeAlias

from farflung.comm.framing import URGENT_NBYTES, compute_piece_nbytes, compute_wire_nbytes
from farflung.network import (
    Fabric,
    Flow,
    NetworkPath,
    ResourceUse,
    TcpModel,
    Wiring,
    compute_repair_s,
    create_tcp_model,
)
from farflung.network.link import Capacity, compute_mean_capacity, map_capacity
from farflung.noise import draw_uniform
from farflung.sim.clock import VirtualClock
from farflung.tasks import Pending

__all__ = ["Flows"]

UNLIMITED_BPS = 1e21
"""Bandwidth that stands for no limit; a message takes less time than the clock can resolve."""
RATE_UPDATE_PRIORITY = 1
"""Clock priority that computes rates after all flows of one time have begun or ended."""
COMMITTED_PIECES = 2
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

    remaining_bits: float
    total_bits: float
    on_arrival: Callable[[float], None]
    departure: Pending[None] = field(default_factory=Pending)
    quota_bits: float = math.inf
    """Bits that may leave before a more urgent message does."""
    began_s: float = 0.0
    """Time at which its first bit left."""
    has_arrived: bool = False

    def arrive(self, time_s: float) -> None:
        """Reports the arrival of the last bit once."""
        if not self.has_arrived:
            self.has_arrived = True
            self.on_arrival(time_s)


_Queued: TypeAlias = tuple[int, int, _Message]
"""Priority, number and message."""


@dataclass(slots=True)
class _SendQueue:
    """Messages of one rank to another, sent one at a time over all connections of the pair."""

    path: NetworkPath
    src: int
    dst: int
    rate_bps: float
    """Rate of the link, if nothing else uses it."""
    tcp: TcpModel | None
    """Congestion state of each connection, if rates are found by TCP."""
    queue: list[_Queued] = field(default_factory=list)
    """Heap of messages."""
    current: _Queued | None = None
    flow: Flow | None = None
    """Current flow in the network."""
    num_sent: int = 0
    sent_bits: float = 0.0
    """Bits of the messages that have left."""
    urgent_until_bits: float = 0.0
    """Value of :attr:`sent_bits` up to which urgent messages are expected."""
    last_arrival_s: float = 0.0
    lost_tail: _Message | None = None
    """Message whose last packets were lost, which nobody knows before a timeout or an acknowledgement of the next."""

    def compute_piece_nbytes(self) -> int:
        """Computes the bytes of a piece of the next message."""
        return compute_piece_nbytes(self.rate_bps, expects_urgent=self.sent_bits < self.urgent_until_bits)


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

    def __init__(self, clock: VirtualClock, wiring: Wiring, seed: int, *, is_encrypted: bool = False) -> None:
        self._clock, self._wiring, self._seed, self._is_encrypted = clock, wiring, seed, is_encrypted
        self._fabric = Fabric(wiring.capacities)
        self._num_sent = 0
        self._queues: dict[tuple[int, int], _SendQueue] = {}
        self._active_queues: dict[Flow, _SendQueue] = {}
        self._ceilings: dict[tuple[int, int], ResourceUse] = {}
        self._is_update_scheduled = False
        self._wakeup_s = math.inf

    def send(
        self, src: int, dst: int, nbytes: int, priority: int, on_arrival: Callable[[float], None]
    ) -> Pending[None]:
        line = self._queues.get((src, dst)) or self._create_queue(src, dst)
        bits = (
            8.0
            * compute_wire_nbytes(nbytes, line.compute_piece_nbytes(), is_encrypted=self._is_encrypted)
            / line.path.num_connections
        )
        message = _Message(bits, bits, on_arrival)
        self._num_sent += 1
        heads = [*line.queue[:1], *([] if line.current is None else [line.current])]
        overtakes = any(priority < head[0] for head in heads)
        heappush(line.queue, (priority, self._num_sent, message))
        if line.current is None:
            self._start_queued(line)
        elif priority < line.current[0]:
            self._yield_to_urgent(line, line.current[2], bits)
        if overtakes:  # only now, since larger pieces have been handed to the kernel
            line.urgent_until_bits = line.sent_bits + 8.0 * URGENT_NBYTES / line.path.num_connections
        return message.departure

    def _create_queue(self, src: int, dst: int) -> _SendQueue:
        path = self._wiring.get_path(src, dst)
        capacities = [compute_mean_capacity(self._wiring.capacities[use.resource]) for use in path.uses]
        if path.num_connections > 1:
            path = replace(
                path,
                uses=tuple(ResourceUse(use.resource, use.times * path.num_connections) for use in path.uses),
            )
        if (src, dst) in self._ceilings:
            path = replace(path, uses=(*path.uses, self._ceilings[src, dst]))
        phase = draw_uniform(self._seed, src, dst)
        tcp = None if path.congestion is None else create_tcp_model(path.congestion, path.round_trip_s, phase)
        line = self._queues[src, dst] = _SendQueue(path, src, dst, min(capacities, default=math.inf), tcp)
        return line

    def limit(self, src: int, dst: int, capacity: Capacity) -> None:
        """Limits the bandwidth of all messages from one rank to another, from now on."""
        capacity = map_capacity(capacity, lambda bps: min(bps, UNLIMITED_BPS))
        ceiling = self._ceilings.get((src, dst))
        if ceiling is not None:
            self._fabric.set_capacity(ceiling.resource, capacity)
        else:
            connections = self._wiring.get_path(src, dst).num_connections
            ceiling = self._ceilings[src, dst] = ResourceUse(len(self._wiring.capacities), connections)
            self._wiring.capacities.append(capacity)
            line = self._queues.get((src, dst))
            if line is not None:
                line.path = replace(line.path, uses=(*line.path.uses, ceiling))
                if line.flow is not None:
                    self._fabric.add_use(line.flow, ceiling)
        self._schedule_update()

    def get_sent_nbytes(self, src: int, dst: int) -> int:
        """Returns the bytes that have left one rank for another so far."""
        line = self._queues.get((src, dst))
        if line is None:
            return 0
        messages = [entry[2] for entry in (*line.queue, *([] if line.current is None else [line.current]))]
        in_flight = 0.0 if line.flow is None else line.flow.compute_remaining_bits(self._clock.time())
        bits = (
            line.sent_bits
            + sum(message.total_bits - message.remaining_bits for message in messages)
            - in_flight
        )
        return int(bits * line.path.num_connections / 8)

    def _start_queued(self, queue: _SendQueue) -> None:
        """Starts the most urgent message of a queue, and the next ones as long as each leaves at once."""
        while queue.queue and queue.current is None:
            queue.current = heappop(queue.queue)
            self._send_next(queue)

    def _send_next(self, queue: _SendQueue) -> None:
        """Continues the current message of a queue, unless it has left or has to yield."""
        assert queue.current is not None
        message = queue.current[2]
        if not message.remaining_bits:
            self._finish_message(queue, message)
        elif not message.quota_bits:
            message.quota_bits = math.inf
            heappush(queue.queue, queue.current)
            queue.current = None
        elif queue.tcp is not None:
            self._clock.call_at(
                max(queue.tcp.next_send_s, self._clock.time()), partial(self._start_flight, queue, message)
            )
        else:
            self._start_flow(queue, message, min(message.remaining_bits, message.quota_bits))

    def _start_flight(self, queue: _SendQueue, message: _Message) -> None:
        """Starts a flow of as many bits as the connection sends before an acknowledgement."""
        assert queue.tcp is not None
        if message.remaining_bits == message.total_bits:
            message.began_s = self._clock.time()
            if queue.lost_tail is not None:
                self._notice_loss(queue, queue.lost_tail)
        self._start_flow(
            queue,
            message,
            queue.tcp.start_flight(self._clock.time(), min(message.remaining_bits, message.quota_bits)),
        )

    def _start_flow(self, queue: _SendQueue, message: _Message, bits: float) -> None:
        message.remaining_bits -= bits
        message.quota_bits -= bits
        if queue.path.uses:
            queue.flow = self._fabric.start(bits, queue.path.uses)
            self._active_queues[queue.flow] = queue
            self._schedule_update()
        else:
            self._handle_flow_end(queue)

    def _yield_to_urgent(self, queue: _SendQueue, message: _Message, urgent_bits: float) -> None:
        """Limits the current message to committed pieces and data in flight, so that a shorter urgent one follows."""
        if message.quota_bits < math.inf:
            return
        time_s, piece = self._clock.time(), 8.0 * queue.compute_piece_nbytes()
        in_flight_bits = 0.0 if queue.flow is None else queue.flow.compute_remaining_bits(time_s)
        if message.remaining_bits + in_flight_bits <= urgent_bits:
            return
        sent_bits = message.total_bits - message.remaining_bits - in_flight_bits
        room_bits = (sent_bits // piece + COMMITTED_PIECES) * piece - sent_bits
        if (
            in_flight_bits > room_bits
            and queue.flow is not None
            and (queue.tcp is None or queue.tcp.is_saturated)
        ):
            self._fabric.truncate(queue.flow, time_s, room_bits)
            message.remaining_bits += in_flight_bits - room_bits
            if queue.tcp is not None:
                queue.tcp.reduce_flight(in_flight_bits - room_bits)
            self._schedule_update()
        message.quota_bits = max(0.0, room_bits - in_flight_bits)

    def _handle_flow_end(self, queue: _SendQueue) -> None:
        """Handles the end of a queue's flow."""
        queue.flow = None
        departure_s = self._clock.time() if queue.tcp is None else queue.tcp.finish_flight(self._clock.time())
        if departure_s > self._clock.time():
            self._clock.call_at(departure_s, partial(self._resume_queue, queue))
        else:
            self._resume_queue(queue)

    def _resume_queue(self, queue: _SendQueue) -> None:
        self._send_next(queue)
        self._start_queued(queue)

    def _finish_message(self, queue: _SendQueue, message: _Message) -> None:
        """Finishes a message whose last bit has left, and schedules its arrival."""
        queue.current = None
        delay = queue.path.latency_s
        if queue.path.jitter_s:
            random = draw_uniform(self._seed, queue.src, queue.dst, queue.num_sent)
            delay += queue.path.jitter_s * (2.0 * random - 1.0)
        if queue.tcp is not None and queue.path.loss:
            lost, repeat = (
                draw_uniform(self._seed, queue.src, queue.dst, queue.num_sent, index) for index in (1, 2)
            )
            bits = message.total_bits * queue.path.num_connections
            duration_s = self._clock.time() - message.began_s
            path, is_last = queue.path, not queue.queue
            repair_s = compute_repair_s(
                bits, duration_s, path.round_trip_s, path.loss, (lost, repeat), is_last=is_last
            )
            delay += repair_s
            queue.lost_tail = message if is_last and repair_s > path.round_trip_s else None
        queue.num_sent += 1
        queue.sent_bits += message.total_bits
        queue.last_arrival_s = max(self._clock.time() + delay, queue.last_arrival_s)
        self._clock.call_at(queue.last_arrival_s, partial(message.arrive, queue.last_arrival_s))
        message.departure.set_result(None)

    def _notice_loss(self, queue: _SendQueue, message: _Message) -> None:
        """Lets a message arrive early that waits for a timeout: the next one's acknowledgement shows what was lost."""
        queue.lost_tail = None
        arrival_s = self._clock.time() + queue.path.round_trip_s + queue.path.latency_s
        if arrival_s < queue.last_arrival_s:
            queue.last_arrival_s = arrival_s
            self._clock.call_at(arrival_s, partial(message.arrive, arrival_s))

    def _schedule_update(self) -> None:
        if not self._is_update_scheduled:
            self._is_update_scheduled = True
            self._clock.call_at(self._clock.time(), self._update_rates, RATE_UPDATE_PRIORITY)

    def _update_rates(self) -> None:
        self._is_update_scheduled = False
        self._fabric.update_rates(self._clock.time())
        next_s = self._fabric.get_next_event_s()
        if next_s < self._wakeup_s:
            self._wakeup_s = next_s
            self._clock.call_at(next_s, self._wake)

    def _wake(self) -> None:
        time_s = self._clock.time()
        if time_s < self._wakeup_s:
            return  # an earlier wake-up was scheduled since, and has run
        self._wakeup_s = math.inf
        for flow in self._fabric.pop_ended(time_s):
            self._handle_flow_end(self._active_queues.pop(flow))
        self._schedule_update()
