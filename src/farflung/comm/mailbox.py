"""Matches arrivals to waits by source and tag, whichever comes first."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from farflung.comm.channel import in_words
from farflung.errors import ProtocolError
from farflung.tasks import Pending, failed
from farflung.types import Payload, Tag, TensorSpec

__all__ = ["Mailbox", "Waiting"]


@dataclass(frozen=True, slots=True)
class Waiting:
    """One receive on its way: who is waited for, for what, since when."""

    src: int | None
    tag: Tag
    since: float
    expect: tuple[TensorSpec, ...] | None
    pending: Pending[Payload]

    @property
    def what(self) -> str:
        """For messages to people."""
        return in_words(self.tag)


class Mailbox:
    """The receiving half of a communicator. Not thread-safe: it belongs to its driver's thread."""

    def __init__(self) -> None:
        self._waits: dict[tuple[int | None, Tag], Waiting] = {}
        self._arrived: dict[Tag, deque[tuple[int, Payload]]] = {}
        self._ended: BaseException | None = None
        self._gone: dict[int, BaseException] = {}
        self.longest_wait_s = 0.0

    def recv(
        self, src: int | None, tag: Tag, expect: tuple[TensorSpec, ...] | None, now: float
    ) -> Pending[Payload]:
        """See :meth:`farflung.types.Communicator.recv`."""
        waiting = Waiting(src, tag, now, expect, Pending())
        queue = self._arrived.get(tag)
        if queue:
            for index, (sender, payload) in enumerate(queue):
                if src is None or src == sender:
                    del queue[index]
                    if not queue:
                        del self._arrived[tag]
                    _hand_over(waiting, sender, payload)
                    return waiting.pending
        ended = self._ended or (None if src is None else self._gone.get(src))
        if ended is not None:
            return failed(ended)
        key = (src, tag)
        if key in self._waits:
            raise RuntimeError(f"two receives for {waiting.what} from {src}")
        self._waits[key] = waiting
        return waiting.pending

    def deliver(self, src: int, tag: Tag, payload: Payload, now: float) -> None:
        """A message has come."""
        waiting = self._waits.pop((src, tag), None) or self._waits.pop((None, tag), None)
        if waiting is None:
            self._arrived.setdefault(tag, deque()).append((src, payload))
            return
        self.longest_wait_s = max(self.longest_wait_s, now - waiting.since)
        _hand_over(waiting, src, payload)

    def oldest(self) -> Waiting | None:
        """The wait that began first."""
        return next(iter(self._waits.values()), None)

    def fail_from(self, src: int, error: BaseException) -> None:
        """Fails every wait for one sender, now and from now on; what it has sent can still be received."""
        self._gone[src] = error
        for key in [key for key in self._waits if key[0] == src]:
            self._waits.pop(key).pending.fail(error)

    def end(self, error: BaseException) -> None:
        """Fails every wait, now and from now on; what has arrived can still be received."""
        if self._ended is None:
            self._ended = error
        waits, self._waits = self._waits, {}
        for waiting in waits.values():
            waiting.pending.fail(self._ended)


def _hand_over(waiting: Waiting, src: int, payload: Payload) -> None:
    if waiting.expect is not None:
        found = tuple(TensorSpec.of(tensor) for tensor in payload.tensors())
        if found != waiting.expect:
            waiting.pending.fail(
                ProtocolError(
                    f"rank {src} sent {_describe(found)} for {waiting.what} where {_describe(waiting.expect)} was "
                    "due: do all ranks run the same model and recipe?"
                )
            )
            return
    waiting.pending.set(payload)


def _describe(specs: tuple[TensorSpec, ...]) -> str:
    return (
        " + ".join(f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)}" for spec in specs)
        or "nothing"
    )
