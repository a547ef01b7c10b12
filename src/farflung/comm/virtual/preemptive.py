"""One link that serves the most urgent message first, and goes on with what it left for it afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol
from weakref import ref

__all__ = ["Later", "Overtaken", "PreemptiveLink", "Queued"]


class Later(NamedTuple):
    """A more urgent message has overtaken one that was sent before.

    Args:
      part: what the sender calls it.
      src: who has sent it.
      dst: whom it is for.
      leaves_s: when its last bit leaves now, in virtual seconds.
      was_s: when it would have arrived.
      arrives_s: when it arrives now.
    """

    part: int
    src: int
    dst: int
    leaves_s: float
    was_s: float
    arrives_s: float


class Overtaken(Protocol):
    """Counts on the time at which a message arrives."""

    def put_off(self, later: Later) -> None:
        """A more urgent one is sent now; told before the time at which the message would have arrived."""
        ...


@dataclass(slots=True)
class Queued:
    """A message that has not left yet.

    Args:
      priority: the smallest is served first, equal ones in their order.
      bits: of it that the link has still to take.
      delay_s: from when its last bit leaves until it arrives.
      whose: told when another overtakes it, while it is there.
      part: for :class:`Later`.
      begins_s: when the link begins with these bits, if no more urgent message comes.
      leaves_s: when it is through with them then.
      arrives_s: when the message is there then.
    """

    priority: int
    bits: float
    delay_s: float
    whose: ref[Overtaken]
    part: int = 0
    begins_s: float = 0.0
    leaves_s: float = 0.0
    arrives_s: float = 0.0


class PreemptiveLink:
    """A preemptive-resume priority queue: when each message leaves and arrives is known while none overtakes it.

    Messages of one priority arrive in their order. A message without bits waits for those of its own priority alone.
    Times are computed as :class:`farflung.network.Fabric` computes those of flows over one resource, with the same
    bits.

    Args:
      src: who sends.
      dst: who receives.
      rate_bps: bits per second.
      queue: what is under way, of priority 0 and in its order, with its times.
      last_arrival_s: when the last of what has left arrives, where nothing is under way.

    References: Kleinrock 1976, Queueing Systems II, section 3.6.
    """

    def __init__(
        self, src: int, dst: int, rate_bps: float, queue: list[Queued], last_arrival_s: float
    ) -> None:
        self._src, self._dst, self._rate_bps = src, dst, rate_bps
        self._queue = queue
        """In the order in which they leave."""
        self._last_arrival_s = {0: last_arrival_s}
        """Of what has left, by priority."""

    def put(self, now: float, message: Queued) -> None:
        """A message is sent now; sets its times, and tells those that it overtakes."""
        while self._queue and self._queue[0].leaves_s <= now:
            left = self._queue.pop(0)
            self._last_arrival_s[left.priority] = left.arrives_s
        if not message.bits and all(one.priority != message.priority for one in self._queue):
            message.begins_s = message.leaves_s = now
            message.arrives_s = max(now + message.delay_s, self._last_arrival_s.get(message.priority, 0.0))
            self._last_arrival_s[message.priority] = message.arrives_s
            return
        place = sum(one.priority <= message.priority for one in self._queue)
        if place == 0 and self._queue:
            first = self._queue[0]
            first.bits = max(0.0, first.bits - self._rate_bps * (now - first.begins_s))
        self._queue.insert(place, message)
        self._serve(place, self._queue[place - 1].leaves_s if place else now, message)

    def _serve(self, place: int, free_s: float, message: Queued) -> None:
        """Sets the times of a new message and of all behind it; the link is free for it at a time."""
        last = dict(self._last_arrival_s)
        for index, one in enumerate(self._queue):
            was_s = one.arrives_s
            if index >= place:
                one.begins_s, one.leaves_s = free_s, free_s + one.bits / self._rate_bps
                free_s = one.leaves_s
                # What arrived in its order before does so now: it is later, and so is what it follows.
                one.arrives_s = max(one.leaves_s + one.delay_s, last.get(one.priority, 0.0), was_s)
                whose = None if one is message else one.whose()
                if whose is not None:
                    whose.put_off(Later(one.part, self._src, self._dst, one.leaves_s, was_s, one.arrives_s))
            last[one.priority] = one.arrives_s
