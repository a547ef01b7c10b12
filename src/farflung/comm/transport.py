"""The transport, which carries frames between the processes of a run, and its listener."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from farflung.comm.keys import Keys
from farflung.comm.peer import Peer
from farflung.comm.records import FIRST, LAST
from farflung.comm.wire import Frame, Head, Message
from farflung.tasks import Pending

__all__ = ["FIRST", "LAST", "Listener", "Traffic", "Transport"]


class Traffic(NamedTuple):
    """The bytes that connections to a member have carried.

    Args:
      heard_nbytes: bytes of any kind from it.
      moved_nbytes: bytes of large tensors to and from it.
    """

    heard_nbytes: int
    moved_nbytes: int


class Listener(Protocol):
    """The receiver of a transport's events, on the thread that polls the transport."""

    def arrived(self, rank: int, message: Message) -> None:
        """Handles a message of an authenticated member.

        Raises:
          WireError: the message is refused; the transport counts and drops it.
        """
        ...

    def room(self, rank: int, head: Head, nbytes: int) -> Tensor | None:
        """Provides memory for the first large tensor of a message; ``None``: the transport allocates it.

        Args:
          rank: the sender.
          head: the message's head.
          nbytes: the tensor's size in bytes.
        """
        ...

    def malformed(self, rank: int, nbytes: int, why: str) -> None:
        """Handles ``nbytes`` unreadable bytes of a member, after which its connection cannot be trusted."""
        ...

    def closed(self, rank: int) -> None:
        """Handles the close of a member's connection from its end, after all messages before it."""
        ...

    def denied(self, rank: int) -> None:
        """Handles a member's refusal of this process's connection."""
        ...

    def ended(self, rank: int) -> None:
        """Handles that no process listens any more at the address of a member which is connected to again."""
        ...


class Transport(Protocol):
    """Authenticated connections to the other processes of a run; refuses messages that are too large.

    It belongs to one thread, which calls :meth:`poll`; only the first :meth:`open` may come before.
    """

    @property
    def me(self) -> Peer:
        """This process's rank, address and token."""
        ...

    @property
    def keys(self) -> Keys | None:
        """The keys that authenticate and encrypt; ``None``: the run does not encrypt."""
        ...

    @property
    def refused(self) -> int:
        """The number of refused messages: foreign to this run, or malformed."""
        ...

    @property
    def turned_away(self) -> int:
        """The number of connections that closed before they were authenticated."""
        ...

    max_nbytes: int
    """The largest payload accepted, in bytes; to be lowered once the model is known."""

    @property
    def held_nbytes(self) -> int:
        """Queued bytes, which can still be overtaken or withdrawn."""
        ...

    def open(self, others: Sequence[Peer], listener: Listener, *, again: bool = False) -> None:
        """Accepts the connections of some peers and connects to the others; may be called again with more peers.

        Args:
          others: the peers; of each pair of this process and a peer, one has an address, see
            :func:`farflung.comm.peer.connects`.
          listener: the receiver of events.
          again: whether they were connected before, so that a refused connection means that a peer has ended
            (:meth:`Listener.ended`). Peers whose connections this process accepts are probed for that too.
        """
        ...

    def dismiss(self, rank: int) -> None:
        """Ends a peer's membership: its connections and messages are refused from now on."""
        ...

    def expects(self, count: int) -> None:
        """Sets the number of connections still to be accepted; at 0, all further ones are refused."""
        ...

    def receive(self, key: bytes, answer: Callable[[bytes], bytes]) -> None:
        """Answers from now on the questions of processes that are no members; see :mod:`farflung.comm.visits`.

        Args:
          key: the run's key, which visitors prove that they know.
          answer: answers a question; what it is asked comes from a process that knows the key.
        """
        ...

    def quiet_s(self, rank: int) -> float:
        """The seconds since bytes of a member have arrived; infinite where it is not connected."""
        ...

    def traffic(self, rank: int) -> Traffic:
        """The bytes that a member's connections have carried so far."""
        ...

    def failed_at(self, rank: int) -> bool:
        """Whether a process at a member's address failed to authenticate as that member."""
        ...

    def send(self, rank: int, frames: Sequence[Frame], *, priority: int = 0, view: int = 0) -> Pending[None]:
        """Queues a message; done when it has left, or fails with :class:`farflung.errors.PeerLost`.

        Args:
          rank: the destination.
          frames: the message's frames.
          priority: the smallest leaves first, after at most a piece of the message being sent.
          view: the view's number, for :meth:`withdraw`.
        """
        ...

    def say(self, rank: int, frames: Sequence[Frame], *, last: bool = False) -> None:
        """Sends a message ahead of all queued ones, or with ``last`` behind them.

        Raises:
          PeerLost: the connection is gone.
        """
        ...

    def withdraw(self, view: int) -> None:
        """Removes a view's queued messages."""
        ...

    def watch(self, fd: int, readable: Callable[[], None]) -> None:
        """Makes :meth:`poll` call ``readable`` whenever ``fd`` is readable."""
        ...

    def call_later(self, seconds: float, fn: Callable[[], object]) -> None:
        """Makes :meth:`poll` call ``fn`` once, so many seconds from now."""
        ...

    def poll(self, timeout_s: float | None) -> None:
        """Waits for events, up to ``timeout_s`` seconds, and passes them on."""
        ...

    def close(self, *, linger: bool) -> None:
        """Closes all connections.

        Args:
          linger: whether queued messages are sent first, for a few seconds at most.
        """
        ...
