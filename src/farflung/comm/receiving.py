"""The receiving half of a communicator, alike in both worlds: a mailbox and a clock."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from torch import Tensor

from farflung.comm.mailbox import Mailbox
from farflung.tasks import Pending
from farflung.types import Payload, Tag, TensorSpec

__all__ = ["Receiving"]


class Receiving(ABC):
    """What :class:`farflung.types.Communicator` says of messages and members that come.

    Args:
      mailbox: of the member.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    @abstractmethod
    def _wait_begins(self, deadline_s: float | None) -> float:
        """The time at which a wait begins that has so many seconds of its own, or none."""

    def recv(
        self,
        src: int,
        tag: Tag,
        expect: tuple[TensorSpec, ...] | None = None,
        *,
        deadline_s: float | None = None,
    ) -> Pending[Payload]:
        return self._mailbox.recv(src, tag, expect, self._wait_begins(deadline_s), deadline_s)

    def land(self, src: int, tag: Tag, into: Tensor) -> None:
        self._mailbox.land(src, tag, into)

    def recv_any(
        self, tag: Tag, expect: tuple[TensorSpec, ...] | None = None, *, deadline_s: float | None = None
    ) -> Pending[tuple[int, Payload]]:
        """Waits for a message of any rank."""
        return self._mailbox.recv_any(tag, expect, self._wait_begins(deadline_s), deadline_s)

    def quiet_s(self, rank: int) -> float:
        """The seconds since bytes of a member have arrived; infinite where that is not known."""
        del rank
        return math.inf

    def forget(self, exchange: int) -> None:
        """Gives its waits up, and drops what comes."""
        self._mailbox.forget(exchange)

    def departure(self) -> Pending[int]:
        """Waits for a member to leave or be lost; the result is its rank."""
        return self._mailbox.departures.next()

    def arrival(self) -> Pending[int]:
        """Waits for a member to be admitted; the result is its rank."""
        return self._mailbox.arrivals.next()
