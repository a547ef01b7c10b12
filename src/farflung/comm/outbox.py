"""What waits to be sent over one connection: the most urgent first, in parcels of a piece or so."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from farflung.comm.wire import Frame, Kind, begin, part
from farflung.tasks import Pending, done

__all__ = ["Outbox", "Withdrawn"]

_LEFT = done(None)


class Withdrawn(Exception):
    """What a message ends with that was taken back before it had left."""


class Outbox:
    """Messages to one peer.

    A message that is larger than a piece leaves in parts, so a more urgent one overtakes its rest. Small ones that
    leave together lie in one frame.

    Args:
      piece: bytes of a parcel, about.
    """

    def __init__(self, piece: int) -> None:
        self._piece = piece
        self._queue: list[tuple[int, int, Sequence[Frame], int, Pending[None]]] = []
        """Priority, number, frames, view, and what is done when it has left: a heap, whose first leaves first."""
        self._count = 0
        self._gone: dict[int, int] = {}
        """How many frames of messages in parts have left, by number; the head among them."""
        self._recalled: list[Frame] = []

    def __bool__(self) -> bool:
        return bool(self._queue or self._recalled)

    @property
    def nbytes(self) -> int:
        return sum(
            len(frame)
            for _, number, frames, *_ in self._queue
            for frame in frames[self._gone.get(number, 0) :]
        )

    def put(self, frames: Sequence[Frame], priority: int, view: int) -> Pending[None]:
        """Queues a message behind all that are as urgent; done when its last part has left, a small one at once.

        Args:
          frames: of the message, see :func:`farflung.comm.wire.encode`.
          priority: the smallest leaves first.
          view: for :meth:`withdraw`.
        """
        left: Pending[None] = _LEFT if len(frames) == 1 else Pending()
        self._count += 1
        heapq.heappush(self._queue, (priority, self._count, frames, view, left))
        return left

    def take(self) -> tuple[Sequence[Frame], Sequence[Pending[None]]]:
        """The next parcel, and what is done once it has left."""
        if len(self._queue) == 1 and not self._gone and not self._recalled:
            _, _, frames, _, left = self._queue[0]
            if sum(map(len, frames)) <= self._piece:
                self._queue.clear()
                return frames, () if left is _LEFT else (left,)
        parcel: list[Frame] = []
        heads, self._recalled = self._recalled, []
        through: list[Pending[None]] = []
        queue, room = self._queue, self._piece
        while queue:
            _, number, frames, _, left = queue[0]
            gone = self._gone.get(number, 0)
            end = self._reach(frames, gone, room, anyway=not parcel and not heads)
            if end == gone:
                break
            more = frames[max(1, gone) : end]
            if gone:
                heads.append(part(Kind.PART, number, len(more)))
            elif end == len(frames):
                heads.append(frames[0])
            else:
                heads.append(begin(frames[0], number, len(more)))
            room -= sum(map(len, more)) + len(heads[-1])
            if more:
                parcel += [b"".join(heads), *more]
                heads = []
            if end < len(frames):
                self._gone[number] = end
                break
            self._gone.pop(number, None)
            heapq.heappop(queue)
            if left is not _LEFT:
                through.append(left)
        if heads:
            parcel.append(b"".join(heads))
        return parcel, through

    @staticmethod
    def _reach(frames: Sequence[Frame], gone: int, room: int, *, anyway: bool) -> int:
        """How many frames of a message will have left with those that fit in so many bytes more.

        Args:
          frames: of the message.
          gone: how many have left.
          room: in bytes.
          anyway: whether one leaves however large it is.
        """
        end = gone
        if gone == 0:
            room -= len(frames[0])
            if room < 0 and not anyway:
                return 0
            end = 1
        begins = end
        while end < len(frames) and (len(frames[end]) <= room or (anyway and end == begins)):
            room -= len(frames[end])
            end += 1
        return gone if end == begins < len(frames) else end

    def withdraw(self, view: int) -> None:
        """Takes back what a view has queued; who has heard a part of it is told that no more will come."""
        withdrawn = [one for one in self._queue if one[3] == view]
        self._queue = [one for one in self._queue if one[3] != view]
        heapq.heapify(self._queue)
        for _, number, _, _, left in withdrawn:
            if self._gone.pop(number, None) is not None:
                self._recalled.append(part(Kind.WITHDRAWN, number, 0))
            left.fail(Withdrawn())

    def adopt(self, other: Outbox) -> None:
        """Takes over what waits in another, whole, behind what is as urgent here."""
        for priority, _, frames, view, left in sorted(other._queue, key=lambda one: one[:2]):
            self._count += 1
            heapq.heappush(self._queue, (priority, self._count, frames, view, left))

    def close(self, error: BaseException) -> None:
        """Ends what waits with an error."""
        queue, self._queue, self._recalled = self._queue, [], []
        self._gone.clear()
        for *_, left in queue:
            left.fail(error)
