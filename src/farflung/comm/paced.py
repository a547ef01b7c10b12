"""Messages between processes of one machine at the pace of a modelled network, without root.

One process, the one that starts the workers, drives the model that virtual time has
(:class:`farflung.comm.virtual.Flows`) by the wall clock. A replica tells it of every message, holds the message back,
and sends it when the model has it arrive. What the machine itself takes comes on top.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from typing_extensions import override

from farflung.comm.keys import Keys
from farflung.comm.outbox import Withdrawn
from farflung.comm.peer import Peer
from farflung.comm.transport import Listener, Transport
from farflung.comm.virtual.clock import VirtualClock
from farflung.comm.virtual.flows import Flows
from farflung.comm.wire import Frame
from farflung.errors import ConfigError, PeerLost, RunLost
from farflung.network import NetworkProfile, Wiring
from farflung.tasks import Pending, failed

__all__ = ["NetworkModel", "PacedTransport"]

_SEND = struct.Struct("!QIIQi")
"""A message sets out: its number, source, destination, bits, priority."""
_TOLD = struct.Struct("!Q?")
"""To its sender: its number, and whether it has arrived; otherwise its last bit has left."""


class NetworkModel(threading.Thread):
    """Drives the model of a network by the wall clock, for the replicas that tell it of their messages.

    Args:
      profile: the network, with its number of nodes.
      folder: for its socket, and for those of the replicas; its path is short.
      seed: of jitter.
    """

    def __init__(self, profile: NetworkProfile, folder: Path, seed: int = 0) -> None:
        super().__init__(name="farflung-network", daemon=True)
        self._folder = folder
        self._clock = VirtualClock()
        self._flows = Flows(self._clock, Wiring(profile), seed)
        self._begin = time.monotonic()
        self._socket = _bound(folder / "network")
        self._ear, self._bell = os.pipe()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        os.write(self._bell, b"!")
        self.join()
        self._socket.close()
        os.close(self._ear)
        os.close(self._bell)

    @override
    def run(self) -> None:
        """Until the block ends; where a trace ends first, the replicas are told."""
        try:
            while True:
                self._clock.run(self._now())
                due = self._clock.due()
                patience = None if math.isinf(due) else max(0.0, due - self._now())
                watched: list[socket.socket | int] = [self._socket, self._ear]
                ready, _, _ = select.select(watched, [], [], patience)
                if self._ear in ready:
                    return
                if self._socket in ready:
                    self._hear()
        except ConfigError as error:
            for link in self._folder.glob("replica-*"):
                self._tell(str(link), str(error).encode())

    def _now(self) -> float:
        return time.monotonic() - self._begin

    def _hear(self) -> None:
        number, src, dst, bits, priority = _SEND.unpack(self._socket.recv(_SEND.size))
        sender = _replica(self._folder, src)

        def set_out() -> None:
            left = self._flows.send(
                src, dst, bits, priority, lambda _: self._tell(sender, _TOLD.pack(number, True))
            )
            left.on_done(lambda _: self._tell(sender, _TOLD.pack(number, False)))

        self._clock.at(self._now(), set_out)

    def _tell(self, address: str, what: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended, and waits for nothing
            self._socket.sendto(what, address)


@dataclass(frozen=True, slots=True)
class _Held:
    """A message that the model has on its way.

    Args:
      left: done when its last bit has left there.
      rank: of whom it is for.
      frames: of the message.
      nbytes: of its payload.
      view: whose it is.
    """

    left: Pending[None]
    rank: int
    frames: Sequence[Frame]
    nbytes: int
    view: int


class PacedTransport:
    """Holds every message back until the model of a network has it arrive; what is said waits for nothing.

    Args:
      inner: carries the messages then.
      model: the folder of the :class:`NetworkModel`.

    Raises:
      RunLost: there is no model there.
    """

    def __init__(self, inner: Transport, model: Path) -> None:
        self._inner = inner
        self._listener: Listener | None = None
        self._held: dict[int, _Held] = {}
        self._count = 0
        self._model = _bound(Path(_replica(model, inner.me.rank)))
        inner.watch(self._model.fileno(), self._hear)
        try:
            self._model.connect(str(model / "network"))
        except OSError as error:
            self.close(linger=False)
            raise RunLost(f"the process that models the network is gone ({error})") from None

    @property
    def held_nbytes(self) -> int:
        """Bytes of messages that the model has on their way, or that have left it and not this process."""
        return sum(one.nbytes for one in self._held.values()) + self._inner.held_nbytes

    def open(self, others: Sequence[Peer], listener: Listener) -> None:
        """See :class:`farflung.comm.transport.Transport`."""
        self._listener = listener
        self._inner.open(others, listener)

    def send(
        self, rank: int, frames: Sequence[Frame], nbytes: int, *, priority: int = 0, view: int = 0
    ) -> Pending[None]:
        """Done when the last bit has left in the model."""
        self._count += 1
        left: Pending[None] = Pending()
        # A message without a payload is one that is held all the same.
        self._held[self._count] = _Held(left, rank, frames, max(1, nbytes), view)
        try:
            self._model.send(_SEND.pack(self._count, self.me.rank, rank, 8 * nbytes, priority))
        except OSError as error:
            return failed(RunLost(f"the process that models the network is gone ({error})"))
        return left

    def _hear(self) -> None:
        """What the model tells."""
        while True:
            try:
                told = self._model.recv(4096, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if len(told) != _TOLD.size:
                assert self._listener is not None
                self._listener.broken(RunLost(told.decode(errors="replace")))
                return
            number, arrived = _TOLD.unpack(told)
            if number not in self._held:
                continue
            held = self._held[number]
            if not arrived:
                held.left.set(None)
                continue
            del self._held[number]
            with contextlib.suppress(PeerLost):  # which shows by itself
                self._inner.say(held.rank, held.frames)

    def withdraw(self, view: int) -> None:
        """Nothing of it arrives; the bits that are under way in the model go on."""
        for number, held in [item for item in self._held.items() if item[1].view == view]:
            del self._held[number]
            held.left.fail(Withdrawn())
        self._inner.withdraw(view)

    def close(self, *, linger: bool) -> None:
        """See :class:`farflung.comm.transport.Transport`."""
        self._model.close()
        self._inner.close(linger=linger)

    @property
    def me(self) -> Peer:
        """See :class:`farflung.comm.transport.Transport`."""
        return self._inner.me

    @property
    def keys(self) -> Keys | None:
        """See :class:`farflung.comm.transport.Transport`."""
        return self._inner.keys

    @property
    def piece(self) -> int:
        """See :class:`farflung.comm.transport.Transport`."""
        return self._inner.piece

    @property
    def refused(self) -> int:
        """See :class:`farflung.comm.transport.Transport`."""
        return self._inner.refused

    @property
    def turned_away(self) -> int:
        """See :class:`farflung.comm.transport.Transport`."""
        return self._inner.turned_away

    def dismiss(self, rank: int) -> None:
        """See :class:`farflung.comm.transport.Transport`."""
        self._inner.dismiss(rank)

    def expects(self, count: int) -> None:
        """See :class:`farflung.comm.transport.Transport`."""
        self._inner.expects(count)

    def failed_at(self, rank: int) -> bool:
        """See :class:`farflung.comm.transport.Transport`."""
        return self._inner.failed_at(rank)

    @property
    def max_nbytes(self) -> int:
        """See :class:`farflung.comm.transport.Transport`."""
        return self._inner.max_nbytes

    @max_nbytes.setter
    def max_nbytes(self, most: int) -> None:
        self._inner.max_nbytes = most

    def say(self, rank: int, frames: Sequence[Frame], *, last: bool = False) -> None:
        """See :class:`farflung.comm.transport.Transport`."""
        self._inner.say(rank, frames, last=last)

    def watch(self, fd: int, readable: Callable[[], None]) -> None:
        """See :class:`farflung.comm.transport.Transport`."""
        self._inner.watch(fd, readable)

    def poll(self, timeout_s: float | None) -> None:
        """See :class:`farflung.comm.transport.Transport`."""
        self._inner.poll(timeout_s)


def _bound(path: Path) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    link.bind(str(path))
    return link


def _replica(folder: Path, rank: int) -> str:
    return str(folder / f"replica-{rank}")
