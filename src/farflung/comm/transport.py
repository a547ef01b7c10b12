"""The transport protocol, which carries frames between the processes of a run, and its listener."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from farflung.comm.keys import Keys
from farflung.comm.loop import EventLoop
from farflung.comm.peer import Peer
from farflung.comm.records import FIRST_PRIORITY, LAST_PRIORITY
from farflung.comm.wire import Frame, Head, Message, WireError
from farflung.tasks import Pending
from farflung.types import Json

__all__ = ["FIRST_PRIORITY", "LAST_PRIORITY", "ConnectionTraffic", "Listener", "Refusals", "Transport"]


class ConnectionTraffic(NamedTuple):
    """Traffic of the connections to a member.

    Args:
      received_nbytes: Bytes of any kind received from it.
      bulk_nbytes: Bytes of large tensors to and from it.
      idle_s: Seconds since bytes of it have arrived; infinity if it is not connected, or if that is unknown.
    """

    received_nbytes: int
    bulk_nbytes: int
    idle_s: float = math.inf


class Refusals:
    """Counts of refused messages and connections, which are logged ever more rarely.

    Args:
      local_peer: Rank and address of this process.
    """

    def __init__(self, local_peer: Peer) -> None:
        self._local_peer = local_peer
        self.num_messages = 0
        """Number of refused messages: foreign to this run, or malformed."""
        self.num_connections = 0
        """Number of connections that closed before they were authenticated."""
        self._next_report_count = 1
        """Number of refusals at which they are logged next."""

    def count_message(self, error: WireError) -> None:
        self.num_messages += 1
        self._report(f"a message ({error})")

    def count_connection(self) -> None:
        self.num_connections += 1
        self._report("a connection")

    def _report(self, subject: str) -> None:
        count = self.num_messages + self.num_connections
        if count >= self._next_report_count:
            self._next_report_count = 2 * count
            logging.getLogger("farflung").warning(
                "rank %d at %s: refused %s that is not of this run; %d messages and %d connections so far",
                self._local_peer.rank,
                self._local_peer.address_text,
                subject,
                self.num_messages,
                self.num_connections,
            )

    def to_json(self) -> dict[str, Json]:
        """Returns both counts by name; empty if there are none."""
        counts: dict[str, Json] = {"messages": self.num_messages, "connections": self.num_connections}
        return counts if any(counts.values()) else {}


class Listener(Protocol):
    """Receiver of a transport's events, on the thread that polls the transport."""

    def handle_message(self, rank: int, message: Message) -> None:
        """Handles a message of an authenticated member, or counts it in :attr:`Transport.refusals`."""
        ...

    def get_recv_buffer(self, rank: int, head: Head, nbytes: int) -> Tensor | None:
        """Provides memory for the first large tensor of a message; if None, the transport allocates it.

        Args:
          rank: Rank of the sender.
          head: Head of the message.
          nbytes: Size of the tensor in bytes.
        """
        ...

    def handle_malformed(self, rank: int, nbytes: int, reason: str) -> None:
        """Handles unreadable bytes of a member, which then counts as lost."""
        ...

    def handle_close(self, rank: int) -> None:
        """Handles the close of a connection by its member, after all earlier messages."""
        ...

    def handle_denial(self, rank: int) -> None:
        """Handles a member's refusal of this process's connection."""
        ...

    def handle_process_end(self, rank: int) -> None:
        """Handles the end of a process: nothing listens any more at the address of a member that is reconnected."""
        ...


class Transport(Protocol):
    """Authenticated connections to the other processes of a run; refuses messages that are too large.

    It belongs to one thread, which calls :meth:`poll`; only the first :meth:`connect_peers` may come before.
    """

    @property
    def local_peer(self) -> Peer:
        """Rank, address and token of this process."""
        ...

    @property
    def keys(self) -> Keys | None:
        """Keys that authenticate and encrypt; None if the run does not encrypt."""
        ...

    @property
    def refusals(self) -> Refusals:
        """Counts of refused messages and connections."""
        ...

    @property
    def loop(self) -> EventLoop:
        """Descriptors and timers for which :meth:`poll` makes calls."""
        ...

    listener: Listener
    """Receiver of events, set before :meth:`connect_peers`."""
    max_nbytes: int
    """Largest payload accepted, in bytes; to be lowered once the model is known."""

    @property
    def queued_nbytes(self) -> int:
        """Queued bytes, which can still be overtaken or withdrawn."""
        ...

    def connect_peers(self, peers: Sequence[Peer], *, is_reconnect: bool = False) -> None:
        """Accepts the connections of some peers and connects to the others; may be called again with more peers.

        Args:
          peers: Peers; of each pair of this process and a peer, one has an address, see
            :func:`farflung.comm.peer.should_connect`.
          is_reconnect: True if they were connected before, so that a refused connection means that a peer has ended
            (:meth:`Listener.handle_process_end`). Peers whose connections this process accepts are then probed too.
        """
        ...

    def remove_peer(self, rank: int) -> None:
        """Removes a peer: refuses its messages, and closes its connections once control messages are sent."""
        ...

    def set_expected(self, count: int) -> None:
        """Sets the number of connections still to be accepted; at 0, all further ones are refused."""
        ...

    def accept_visits(self, key: bytes, answer: Callable[[bytes], bytes]) -> None:
        """Accepts questions of processes that are not members from now on; see :mod:`farflung.comm.visits`.

        Args:
          key: Key of the run; visitors prove that they know it.
          answer: Answers a question of a process that knows the key.
        """
        ...

    def get_traffic(self, rank: int) -> ConnectionTraffic:
        """Returns the traffic of a member's connections so far."""
        ...

    def has_failed_auth(self, rank: int) -> bool:
        """Returns True if a process at a member's address failed to authenticate as that member."""
        ...

    def send(self, rank: int, frames: Sequence[Frame], *, priority: int = 0, view: int = 0) -> Pending[None]:
        """Queues a message; done when it has left, or fails with :class:`farflung.errors.PeerLost`.

        Args:
          rank: Rank of the destination.
          frames: Frames of the message.
          priority: The smallest leaves first, after at most a piece of the message being sent.
          view: Number of the view, for :meth:`withdraw`; :data:`farflung.comm.records.CONTROL_VIEW` for messages that
            are still sent after :meth:`remove_peer`.
        """
        ...

    def withdraw(self, view: int) -> None:
        """Removes a view's queued messages."""
        ...

    def poll(self, timeout_s: float | None) -> None:
        """Sends queued messages, waits for events, up to ``timeout_s`` seconds, and passes them on."""
        ...

    def close(self) -> None:
        """Closes all connections, after queued messages to peers that are not removed, for a few seconds at most."""
        ...
