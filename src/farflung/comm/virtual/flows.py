"""Messages that share capacities: each is a flow in a :class:`farflung.network.Fabric`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from farflung.comm.virtual.clock import Clock
from farflung.network import Fabric, Flow, Path, Tcp, Use, repaired_s
from farflung.network.link import Capacity, map_capacity
from farflung.noise import uniform
from farflung.tasks import Pending

__all__ = ["Flows", "Paths"]

UNLIMITED_BPS = 1e21
"""At which a message takes less time than the clock can tell, in the place of a limit that was lifted."""
AFTER_ALL_ELSE = 1
"""Priority on the clock: rates are worked out once all that begins or ends at one time has done so."""


@dataclass(slots=True)
class _Message:
    bits: float
    """That have not left yet."""
    whole: float
    """All of them."""
    arrived: Callable[[float], None]
    left: Pending[None]
    began_s: float = 0.0
    """When its first bit left."""


@dataclass(slots=True)
class _Line:
    """The messages of one rank to another of one priority: the first is on its way, the others wait for it."""

    path: Path
    src: int
    dst: int
    priority: int
    queue: deque[_Message]
    tcp: Tcp | None
    """What its connection knows of its rate, where it has to find it."""
    sent: int = 0
    last_arrival: float = 0.0


class Paths(Protocol):
    """Which way a message goes, between nodes or between groups of them."""

    capacities: list[Capacity]
    """Of the resources that paths use; grows with them."""

    def path(self, src: int, dst: int) -> Path:
        """From one to another."""
        ...


class Flows:
    """Messages share links, nodes' capacities and media max-min fairly, the most urgent priority first.

    Those of one sender to one receiver with one priority follow each other, as on one connection; one with a smaller
    priority overtakes them at once, in the middle of a message. A delay never puts one before its predecessor.

    Args:
      clock: virtual time.
      paths: :class:`farflung.network.Wiring` of a profile, or the like.
      seed: of the jitter.
    """

    def __init__(self, clock: Clock, paths: Paths, seed: int) -> None:
        self._clock, self._paths, self._seed = clock, paths, seed
        self._fabric = Fabric(paths.capacities)
        self._under_way = 0
        self._lines: dict[tuple[int, int, int], _Line] = {}
        self._flying: dict[Flow, _Line] = {}
        self._ceilings: dict[tuple[int, int], Use] = {}
        self._settling = False
        self._wakes_at = math.inf

    def send(
        self, src: int, dst: int, bits: int, priority: int, arrived: Callable[[float], None]
    ) -> Pending[None]:
        key = (src, dst, priority)
        line = self._lines.get(key)
        if line is None:
            path = self._paths.path(src, dst)
            if (src, dst) in self._ceilings:
                path = replace(path, uses=(*path.uses, self._ceilings[src, dst]))
            tcp = None if path.congestion is None else Tcp(path.congestion, path.round_trip_s)
            line = self._lines[key] = _Line(path, src, dst, priority, deque(), tcp)
        message = _Message(bits, bits, arrived, Pending())
        self._under_way += 1
        line.queue.append(message)
        if len(line.queue) == 1:
            self._start(line)
        return message.left

    def limit(self, src: int, dst: int, capacity: Capacity) -> None:
        """From now on all messages of one rank to another together get no more bandwidth than this."""
        capacity = map_capacity(capacity, lambda bps: min(bps, UNLIMITED_BPS))
        ceiling = self._ceilings.get((src, dst))
        if ceiling is not None:
            self._fabric.set_capacity(ceiling.resource, capacity)
        else:
            ceiling = self._ceilings[src, dst] = Use(len(self._paths.capacities))
            self._paths.capacities.append(capacity)
            for line in self._lines.values():
                if (line.src, line.dst) == (src, dst):
                    line.path = replace(line.path, uses=(*line.path.uses, ceiling))
            for flow, line in self._flying.items():
                if (line.src, line.dst) == (src, dst):
                    self._fabric.use(flow, ceiling)
        self._settle_soon()

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way."""
        return not self._under_way

    def _start(self, line: _Line) -> None:
        """The first message of a line goes on; what takes no time has left at once."""
        while line.queue:
            bits = line.queue[0].bits
            if bits == line.queue[0].whole:
                line.queue[0].began_s = self._clock.now()
            if bits and line.tcp is not None:
                self._clock.at(max(line.tcp.free_s, self._clock.now()), lambda: self._fly(line))
                return
            if bits and line.path.uses:
                self._flow(line, bits)
                return
            self._leave(line)

    def _fly(self, line: _Line) -> None:
        """As much of a line's first message sets out as its connection sends before it hears from the other end."""
        assert line.tcp is not None
        bits = line.tcp.flight(self._clock.now(), line.queue[0].bits)
        if line.path.uses:
            self._flow(line, bits)
        else:
            line.queue[0].bits -= bits
            self._passed(line)

    def _flow(self, line: _Line, bits: float) -> None:
        line.queue[0].bits -= bits
        self._flying[self._fabric.start(bits, line.path.uses, line.priority)] = line
        self._settle_soon()

    def _passed(self, line: _Line) -> None:
        """The network has taken all of a line that was under way."""
        left = self._clock.now() if line.tcp is None else line.tcp.passed(self._clock.now())
        if left > self._clock.now():
            self._clock.at(left, lambda: self._go_on(line))
        else:
            self._go_on(line)

    def _go_on(self, line: _Line) -> None:
        if not line.queue[0].bits:
            self._leave(line)
        self._start(line)

    def _leave(self, line: _Line) -> None:
        """The last bit of a line's first message has left."""
        message = line.queue.popleft()
        delay = line.path.latency_s
        if line.path.jitter_s:
            drawn = uniform(self._seed, line.src, line.dst, line.sent)
            delay += line.path.jitter_s * (2.0 * drawn - 1.0)
        if line.tcp is not None and line.path.loss:
            delay += self._repaired_s(line, message)
        line.sent += 1
        arrives = line.last_arrival = max(self._clock.now() + delay, line.last_arrival)
        self._clock.at(arrives, lambda: self._arrive(message))
        message.left.set(None)

    def _repaired_s(self, line: _Line, message: _Message) -> float:
        took_s = self._clock.now() - message.began_s
        lost, again = (uniform(self._seed, line.src, line.dst, line.sent, which) for which in (1, 2))
        path = line.path
        return repaired_s(
            message.whole, took_s, path.round_trip_s, path.loss, (lost, again), last=not line.queue
        )

    def _arrive(self, message: _Message) -> None:
        self._under_way -= 1
        message.arrived(self._clock.now())

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
