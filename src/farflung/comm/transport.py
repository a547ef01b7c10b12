"""What carries frames between the processes of a run, and who is told of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from farflung.comm.keys import Keys
from farflung.comm.peer import Peer
from farflung.comm.records import FIRST, LAST
from farflung.comm.wire import Frame, Head, Message
from farflung.tasks import Pending

__all__ = ["FIRST", "LAST", "Listener", "Transport"]


class Listener(Protocol):
    """Who is told what a transport sees; on the thread that polls it."""

    def arrived(self, rank: int, message: Message) -> None:
        """A message of a member's, who has proved to be it.

        Raises:
          WireError: it is refused; it is counted, and nothing of it is used.
        """
        ...

    def room(self, rank: int, head: Head, nbytes: int) -> Tensor | None:
        """Gives memory for the first large tensor of a member's message; ``None``: the transport does.

        Args:
          rank: of the member.
          head: of the message.
          nbytes: of the tensor.
        """
        ...

    def malformed(self, rank: int, nbytes: int, why: str) -> None:
        """So many bytes have come of a member, and cannot be read: nothing that follows can be trusted."""
        ...

    def closed(self, rank: int) -> None:
        """A member's connection was closed from its end; all that came before has been told."""
        ...

    def denied(self, rank: int) -> None:
        """A member does not let this process in."""
        ...


class Transport(Protocol):
    """Connections to the other processes of a run: each proves who it is, and what is too large is refused.

    It belongs to one thread, which calls :meth:`poll`; only the first :meth:`open` may come before.
    """

    @property
    def me(self) -> Peer:
        """How this process is reached and recognised."""
        ...

    @property
    def keys(self) -> Keys | None:
        """What this process proves itself with where it encrypts; ``None``: it does not."""
        ...

    @property
    def refused(self) -> int:
        """Messages that were none of this run's, or malformed."""
        ...

    @property
    def turned_away(self) -> int:
        """Connections that closed before they had proved who they were from."""
        ...

    max_nbytes: int
    """The largest payload accepted, in bytes; to be lowered once the model is known."""

    @property
    def held_nbytes(self) -> int:
        """Bytes that were sent and have not left yet, and can be overtaken or withdrawn."""
        ...

    def open(self, others: Sequence[Peer], listener: Listener) -> None:
        """Lets those in that connect to this process, and connects to the others; more of them may come later.

        Args:
          others: no two of which neither can be reached are among them and this process, see
            :func:`farflung.comm.peer.connects`.
          listener: is told of them.
        """
        ...

    def dismiss(self, rank: int) -> None:
        """A member that is let in, or was, is none any more: what comes from it is refused."""
        ...

    def expects(self, count: int) -> None:
        """So many are still to come in; when none is, nobody gets in any more."""
        ...

    def failed_at(self, rank: int) -> bool:
        """Whether somebody was reached at a member's address who did not prove to be it."""
        ...

    def send(self, rank: int, frames: Sequence[Frame], *, priority: int = 0, view: int = 0) -> Pending[None]:
        """Done when the message has left, or fails with :class:`farflung.errors.PeerLost`.

        Args:
          rank: of whom it is for.
          frames: of the message.
          priority: the smallest leaves first; it waits for no more than a piece of what is under way.
          view: for :meth:`withdraw`.
        """
        ...

    def say(self, rank: int, frames: Sequence[Frame], *, last: bool = False) -> None:
        """Sends a message at once, ahead of everything that was sent before, or else behind all of it.

        Raises:
          PeerLost: the connection is gone.
        """
        ...

    def withdraw(self, view: int) -> None:
        """Takes back what a view has sent and has not left yet."""
        ...

    def watch(self, fd: int, readable: Callable[[], None]) -> None:
        """Lets :meth:`poll` wake up when ``fd`` becomes readable, and call ``readable``."""
        ...

    def poll(self, timeout_s: float | None) -> None:
        """Waits for something to happen, and tells all there is."""
        ...

    def close(self, *, linger: bool) -> None:
        """Closes all connections.

        Args:
          linger: whether what was sent leaves first, for a few seconds at most.
        """
        ...
