"""Puts together again what a peer has sent in parcels; see :mod:`farflung.comm.outbox`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from farflung.comm.wire import Buffer, Head, Kind, Message, WireError, head_in, message_of

__all__ = ["Inbox"]

AT_ONCE = 64
"""Messages of one peer that may have come in part; it sends as many only where each overtakes the one before."""


@dataclass(slots=True)
class _Begun:
    """A message that has come in part.

    Args:
      head: of it.
      described: the bytes of its head.
      frames: behind it, so far.
      due: how many it has in all.
    """

    head: Head
    described: memoryview
    frames: list[Buffer]
    due: int


class Inbox:
    """Messages from one peer.

    Args:
      piece: bytes of each frame but the last of a large tensor.
    """

    def __init__(self, piece: int) -> None:
        self._piece = piece
        self._begun: dict[int, _Begun] = {}

    def take(self, parcel: Sequence[Buffer], max_nbytes: int) -> list[Message | WireError]:
        """The messages that are whole with this parcel, and why others of it are refused.

        Args:
          parcel: its frames.
          max_nbytes: the largest payload accepted.

        Raises:
          WireError: it is none; none of its messages is used.
        """
        whole: list[Message | WireError] = []
        at, count = 0, len(parcel)
        while at < count or at == 0:
            frame, begin = memoryview(parcel[at] if parcel else b""), 0
            at += 1
            while begin < len(frame) or begin == 0:
                described = frame[begin:]
                head = head_in(described)
                begin += head.nbytes
                following = parcel[at : at + head.follow]
                if len(following) < head.follow or (following and begin < len(frame)):
                    raise WireError("fewer frames than announced")
                at += head.follow
                try:
                    head.check(max_nbytes)
                except WireError as error:
                    whole.append(error)
                    continue
                if head.number == 0 and head.layout is not None:
                    whole.append(message_of(head, described[: head.nbytes], following, self._piece))
                elif (message := self._in_parts(head, described[: head.nbytes], following)) is not None:
                    whole.append(message)
        return whole

    def _in_parts(self, head: Head, described: memoryview, frames: Sequence[Buffer]) -> Message | None:
        """The message of a part, if it is whole with it."""
        if head.kind is Kind.WITHDRAWN:
            self._begun.pop(head.number, None)
            return None
        begun = self._begun.get(head.number)
        if head.kind is not Kind.PART:
            if begun is not None or len(self._begun) >= AT_ONCE:
                raise WireError("more messages in parts than may be")
            begun = self._begun[head.number] = _Begun(head, described, [], head.frames_due(self._piece))
        elif begun is None:
            raise WireError("a part of nothing that has begun")
        begun.frames += frames
        if len(begun.frames) < begun.due:
            return None
        del self._begun[head.number]
        return message_of(begun.head, begun.described, begun.frames, self._piece)
