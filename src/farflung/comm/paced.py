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
from pathlib import Path
from typing import Any, Self

import zmq

from farflung.comm.virtual.clock import VirtualClock
from farflung.comm.virtual.flows import Flows
from farflung.comm.wire import Kind
from farflung.comm.zeromq import ZmqCommunicator
from farflung.errors import ConfigError, PeerLost, RunLost
from farflung.network import NetworkProfile, Wiring
from farflung.tasks import Pending, failed
from farflung.types import Payload, Tag

__all__ = ["NetworkModel", "PacedCommunicator"]

_SEND = struct.Struct("!QIIQ")
"""A message sets out: its number, source, destination, bits."""
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
        number, src, dst, bits = _SEND.unpack(self._socket.recv(_SEND.size))
        sender = _replica(self._folder, src)

        def set_out() -> None:
            left = self._flows.send(src, dst, bits, 0, lambda _: self._tell(sender, _TOLD.pack(number, True)))
            left.on_done(lambda _: self._tell(sender, _TOLD.pack(number, False)))

        self._clock.at(self._now(), set_out)

    def _tell(self, address: str, what: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended, and waits for nothing
            self._socket.sendto(what, address)


class PacedCommunicator(ZmqCommunicator):
    """Holds every message back until the model of a network has it arrive.

    Args:
      rank: this replica.
      size: number of replicas.
      model: the folder of the :class:`NetworkModel`.
      options: of :class:`farflung.comm.ZmqCommunicator`.

    Raises:
      RunLost: there is no model there.
    """

    def __init__(self, rank: int, size: int, model: Path, **options: Any) -> None:
        super().__init__(rank, size, **options)
        self._held: dict[int, tuple[Pending[None], int, list[Any]]] = {}
        self._count = 0
        self._model = _bound(Path(_replica(model, rank)))
        self._poller.register(self._model, zmq.POLLIN)
        try:
            self._model.connect(str(model / "network"))
        except OSError as error:
            self.close()
            raise RunLost(f"the process that models the network is gone ({error})") from None

    def send(self, payload: Payload, dst: int, tag: Tag) -> Pending[None]:
        """Done when the last bit has left in the model."""
        self._count += 1
        left: Pending[None] = Pending()
        self._held[self._count] = left, dst, self._frames(Kind.DATA, tag, payload)
        try:
            self._model.send(_SEND.pack(self._count, self.rank, dst, 8 * payload.nbytes))
        except OSError as error:
            return failed(RunLost(f"the process that models the network is gone ({error})"))
        return left

    def poll(self, timeout_s: float | None) -> bool:
        """See :meth:`farflung.comm.ZmqCommunicator.poll`."""
        rung = super().poll(timeout_s)
        while True:
            try:
                told = self._model.recv(4096, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return rung
            if len(told) != _TOLD.size:
                self.end(RunLost(told.decode(errors="replace")))
                return rung
            number, arrived = _TOLD.unpack(told)
            left, dst, frames = self._held[number]
            if not arrived:
                left.set(None)
                continue
            del self._held[number]
            with contextlib.suppress(PeerLost):  # which shows by itself
                self._send(dst, frames)

    def farewell(self, error: BaseException | None) -> None:
        """Takes leave once everything held back has been sent; at once after an error."""
        while self._held and error is None and self.lost is None:
            self.poll(None)
        super().farewell(error)

    def close(self) -> None:
        """See :meth:`farflung.comm.ZmqCommunicator.close`."""
        self._model.close()
        super().close()


def _bound(path: Path) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    link.bind(str(path))
    return link


def _replica(folder: Path, rank: int) -> str:
    return str(folder / f"replica-{rank}")
