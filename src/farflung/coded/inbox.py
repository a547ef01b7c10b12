"""All that a coordinator waits for, in one queue."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any, TypeAlias

from farflung.coded import tags
from farflung.errors import WaitEnded
from farflung.tasks import Pending
from farflung.types import Payload, Runtime, Tag

__all__ = ["Alarm", "Answer", "Back", "Event", "Gone", "Heard", "Inbox"]


@dataclass(frozen=True, slots=True)
class Heard:
    """A device has told something."""

    rank: int
    payload: Payload


@dataclass(frozen=True, slots=True)
class Answer:
    """A piece of a product has come."""

    round: int
    rank: int
    payload: Payload


@dataclass(frozen=True, slots=True)
class Gone:
    """A device is gone."""

    rank: int


@dataclass(frozen=True, slots=True)
class Back:
    """A device has come after the first meeting, where one of its rank may have been before."""

    rank: int


@dataclass(frozen=True, slots=True)
class Alarm:
    """A time that was asked for has come."""

    number: int


Event: TypeAlias = Heard | Answer | Gone | Back | Alarm


class Inbox:
    """Takes in what comes beside whoever reads it, one event after the other.

    Args:
      runtime: the coordinator's.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._comm = runtime, runtime.comm
        self._events: deque[Event] = deque()
        self._wait: Pending[Any] | None = None
        self._alarms = 0
        for service in (self._listen(), self._watch(), self._look_out()):
            runtime.launch(service)

    async def next(self) -> Event:
        """The next event; alarms end every wait."""
        while not self._events:
            self._wait = Pending()
            if self._events:
                break
            await self._wait
        return self._events.popleft()

    def open(self, round: int) -> None:
        """Answers of a round are taken in from now on."""
        self._runtime.launch(self._answers(round))

    def shut(self, round: int) -> None:
        """They are dropped, and counted, from now on."""
        self._runtime.launch(self._forget(round))

    def alarm(self, t: float) -> int:
        """Asks for an :class:`Alarm` at a time; its number."""
        self._alarms += 1
        event = Alarm(self._alarms)
        self._runtime.sleep_until(t).on_done(lambda _: self._put(event))
        return event.number

    async def _forget(self, round: int) -> None:
        self._comm.forget(tags.answers(round).exchange)

    def _put(self, event: Event) -> None:
        self._events.append(event)
        if self._wait is not None:
            self._wait.set(None)

    async def _listen(self) -> None:
        while True:
            rank, payload = await self._any(tags.REPORT)
            self._put(Heard(rank, payload))

    async def _answers(self, round: int) -> None:
        try:
            while True:
                rank, payload = await self._any(tags.answers(round))
                self._put(Answer(round, rank, payload))
        except WaitEnded:
            return

    async def _watch(self) -> None:
        while True:
            self._put(Gone(await self._comm.departure()))

    async def _look_out(self) -> None:
        while True:
            self._put(Back(await self._comm.arrival()))

    def _any(self, tag: Tag) -> Pending[tuple[int, Payload]]:
        return self._comm.recv_any(tag, deadline_s=math.inf)
