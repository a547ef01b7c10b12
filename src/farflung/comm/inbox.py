"""Puts together again what a peer has sent in parcels; see :mod:`farflung.comm.outbox`."""

from __future__ import annotations

from collections.abc import Sequence

from farflung.comm.pool import Pool
from farflung.comm.wire import Buffer, Head, Kind, Landing, Message, WireError, head_in

__all__ = ["Inbox"]

AT_ONCE = 64
"""Messages of one peer that may have come in part; it sends as many only where each overtakes the one before."""


class Inbox:
    """Messages from one peer.

    Args:
      piece: bytes of each frame but the last of a large tensor.
      pool: of memory for large tensors.
    """

    def __init__(self, piece: int, pool: Pool) -> None:
        self._piece, self._pool = piece, pool
        self._begun: dict[int, Landing] = {}

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
                head = head_in(frame, begin)
                described = frame[begin : begin + head.nbytes]
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
                if head.kind is Kind.WITHDRAWN:
                    self._begun.pop(head.number, None)
                    continue
                landing = self._landing(head, described)
                for one in following:
                    landing.take(one)
                if landing.whole:
                    self._begun.pop(head.number, None)
                    whole.append(landing.message())
                elif head.number == 0:
                    raise WireError("fewer frames than described")
        return whole

    def _landing(self, head: Head, described: memoryview) -> Landing:
        """Where the frames behind a head go."""
        if head.kind is Kind.PART:
            if head.number not in self._begun:
                raise WireError("a part of nothing that has begun")
            return self._begun[head.number]
        landing = Landing(head, described, self._piece, self._pool.tensor)
        if head.number:
            if head.number in self._begun or len(self._begun) >= AT_ONCE:
                raise WireError("more messages in parts than may be")
            self._begun[head.number] = landing
        return landing
