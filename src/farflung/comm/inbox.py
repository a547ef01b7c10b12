"""Puts together again what a peer has sent in parcels; see :mod:`farflung.comm.outbox`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from farflung.comm.wire import Buffer, Header, Kind, Message, WireError, decode, frames_due, header_of

__all__ = ["Inbox"]

AT_ONCE = 64
"""Messages of one peer that may have come in part; it sends as many only where each overtakes the one before."""


@dataclass(slots=True)
class _Begun:
    """A message that has come in part.

    Args:
      frames: so far.
      due: how many it has in all.
    """

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

    def take(self, parcel: Sequence[Buffer], max_nbytes: int) -> list[Message]:
        """The messages that are whole with this parcel.

        Args:
          parcel: its frames.
          max_nbytes: the largest payload accepted.

        Raises:
          WireError: it is none; nothing of it is used.
        """
        sections = list(_sections(parcel))
        whole: list[Message] = []
        for header, frames in sections:
            found = self._section(header, frames, max_nbytes)
            if found is not None:
                whole.append(decode(found, max_nbytes=max_nbytes, piece=self._piece))
        return whole

    def _section(self, header: Header, frames: list[Buffer], max_nbytes: int) -> list[Buffer] | None:
        """The frames of a message that is whole now."""
        if header.kind is Kind.WITHDRAWN:
            self._begun.pop(header.number, None)
            return None
        if header.kind is not Kind.PART:
            if header.number == 0:
                return frames
            return self._go_on(header.number, self._begin(header, frames, max_nbytes), [])
        begun = self._begun.get(header.number)
        if begun is None:
            raise WireError("a part of nothing that has begun")
        return self._go_on(header.number, begun, frames[1:])

    def _begin(self, header: Header, frames: list[Buffer], max_nbytes: int) -> _Begun:
        if header.number in self._begun or len(self._begun) >= AT_ONCE:
            raise WireError("more messages in parts than may be")
        begun = _Begun(frames, 1 + frames_due(frames[0], max_nbytes=max_nbytes, piece=self._piece))
        self._begun[header.number] = begun
        return begun

    def _go_on(self, number: int, begun: _Begun, frames: Sequence[Buffer]) -> list[Buffer] | None:
        begun.frames += frames
        if len(begun.frames) < begun.due:
            return None
        del self._begun[number]
        return begun.frames


def _sections(parcel: Sequence[Buffer]) -> Iterator[tuple[Header, list[Buffer]]]:
    """What lies in a parcel: headers, and all frames of each from there on."""
    at = 0
    while at < len(parcel) or at == 0:
        header = header_of(parcel[at] if parcel else b"")
        end = at + 1 + header.follow
        if end > len(parcel):
            raise WireError("fewer frames than announced")
        yield header, list(parcel[at:end])
        at = end
