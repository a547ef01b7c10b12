"""What waits to be sent over one connection: the most urgent first, in parcels of a piece or so."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from farflung.comm.wire import Frame, Kind, begin, part
from farflung.tasks import Pending

__all__ = ["Outbox", "Withdrawn"]


class Withdrawn(Exception):
    """What a message ends with that was taken back before it had left."""


@dataclass(order=True, slots=True)
class _Queued:
    """A message on its way out.

    Args:
      priority: the smallest leaves first.
      order: in which it came; it is also the message's number where it leaves in parts.
      frames: of the whole message.
      view: whose message it is.
      left: done when it has left.
      gone: how many frames have, the header's among them.
    """

    priority: int
    order: int
    frames: Sequence[Frame] = field(compare=False)
    view: int = field(compare=False)
    left: Pending[None] = field(compare=False)
    gone: int = field(default=0, compare=False)

    def take(self, room: int, *, anyway: bool) -> list[Frame]:
        """As many more frames as fit in ``room`` bytes behind a header of their own; none where that is too little.

        Args:
          room: in bytes.
          anyway: whether one frame is taken however large it is.
        """
        begins = self.gone == 0
        at = end = 1 if begins else self.gone
        room -= len(self.frames[0]) if begins else 0
        if room < 0 and not anyway:
            return []
        while end < len(self.frames) and (len(self.frames[end]) <= room or (anyway and end == at)):
            room -= len(self.frames[end])
            end += 1
        if end == at < len(self.frames):
            return []
        self.gone = end
        if begins and end == len(self.frames):
            return list(self.frames)
        head = (
            begin(self.frames[0], self.order, end - at) if begins else part(Kind.PART, self.order, end - at)
        )
        return [head, *self.frames[at:end]]

    @property
    def through(self) -> bool:
        """Whether all of it has been taken."""
        return self.gone == len(self.frames)


class Outbox:
    """Messages to one peer.

    A message that is larger than a piece leaves in parts, so a more urgent one overtakes its rest. Small ones that
    had to wait leave together.

    Args:
      piece: bytes of a parcel, about.
    """

    def __init__(self, piece: int) -> None:
        self._piece = piece
        self._queue: list[_Queued] = []
        self._count = 0
        self._recalled: list[Frame] = []

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._queue or self._recalled)

    @property
    def nbytes(self) -> int:
        """Of what waits."""
        return sum(len(frame) for one in self._queue for frame in one.frames[one.gone :])

    def put(self, frames: Sequence[Frame], priority: int, view: int) -> Pending[None]:
        """Queues a message behind all that are as urgent; done when its last part has been taken.

        Args:
          frames: of the message, see :func:`farflung.comm.wire.encode`.
          priority: the smallest leaves first.
          view: for :meth:`withdraw`.
        """
        left: Pending[None] = Pending()
        self._count += 1
        heapq.heappush(self._queue, _Queued(priority, self._count, frames, view, left))
        return left

    def take(self) -> tuple[list[Frame], list[Pending[None]]]:
        """The next parcel, and what is done once it has left."""
        parcel, self._recalled = self._recalled, []
        through: list[Pending[None]] = []
        room = self._piece
        while self._queue:
            first = self._queue[0]
            more = first.take(room, anyway=not parcel)
            if not more:
                break
            parcel += more
            room -= sum(map(len, more))
            if not first.through:
                break
            through.append(heapq.heappop(self._queue).left)
        return parcel, through

    def withdraw(self, view: int) -> None:
        """Takes back what a view has queued; who has heard a part of it is told that no more will come."""
        withdrawn = [one for one in self._queue if one.view == view]
        self._queue = [one for one in self._queue if one.view != view]
        heapq.heapify(self._queue)
        self._recalled += [part(Kind.WITHDRAWN, one.order, 0) for one in withdrawn if one.gone]
        for one in withdrawn:
            one.left.fail(Withdrawn())

    def close(self, error: BaseException) -> None:
        """Ends what waits with an error."""
        queue, self._queue, self._recalled = self._queue, [], []
        for one in queue:
            one.left.fail(error)
