"""Where coordinator and devices of real processes find each other: at the coordinator's port, by visits.

A device asks for a seat there. The coordinator gives it a rank, lets it in when it says how it is reached, and takes
the seat back when the device is gone or has not greeted in time. A coordinator that comes again gives seats anew.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from typing_extensions import override

from farflung.coded.blocks import Holding
from farflung.coded.device import Device
from farflung.comm import Endpoint, Peer
from farflung.comm.endpoint import NO_WAY_IN, advertised
from farflung.comm.interface import check_host, route_to
from farflung.comm.visits import Access, answered
from farflung.devices import DeviceProfile
from farflung.errors import ConfigError, DeadlinePassed, FarflungError, PeerFailed, PeerLost, ProtocolError
from farflung.tasks import Pending, failed
from farflung.types import Json
from farflung.wall import Pace, WallRuntime
from farflung.wall.stores import reached

__all__ = ["Address", "admitted", "attending", "coordinating", "take_part"]

SEATS = 256
"""How many processes may be there at a time, the coordinator among them."""
_KEY = hashlib.sha256(b"farflung coded").digest()
"""Of all runs, and no secret: whatever reaches the coordinator may take part, as far as its keys allow."""
_VISIT_S = 5.0
"""How long one visit may take."""
_RETRY_S = 0.5
"""How long a device that has lost its coordinator waits before it looks for another."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a coordinator is met.

    Args:
      host: its name or address.
      port: 0: any that is free, for the coordinator itself.
    """

    host: str
    port: int

    @staticmethod
    def of(text: str) -> Address:
        """From ``HOST:PORT``.

        Raises:
          ConfigError: it is something else.
        """
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(f"{text!r}: an address is HOST:PORT, such as 192.168.1.5:29500")
        return Address(host.strip("[]"), int(port))

    @override
    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@contextmanager
def coordinating(
    address: Address, run: str, endpoint: Endpoint = Endpoint(), *, join_s: float = 30.0
) -> Iterator[tuple[WallRuntime, Address]]:
    """Rank 0 of a run, and where it is met: by the address that it advertises, if any; devices that come are admitted.

    Args:
      address: to be met at.
      run: its name.
      endpoint: how it connects to devices; its interface and port are those of the address.
      join_s: how long a device may take from its seat to its greeting, in seconds.

    Raises:
      ConfigError: there is no such host, or the address cannot be used.
    """
    check_host(address.host, str(address))
    if endpoint.advertise == NO_WAY_IN:
        raise ConfigError(
            f"--advertise {NO_WAY_IN}: devices connect to the coordinator, so it has to be reached"
        )
    if endpoint.advertise is not None:
        advertised(endpoint.advertise, address.port or 1)
    endpoint.read_keys()
    (_, _, _, _, (interface, *_)), *_ = socket.getaddrinfo(address.host, None, type=socket.SOCK_STREAM)
    endpoint = replace(endpoint, interface=str(interface), port=address.port)
    try:
        runtime = _runtime(0, run, endpoint, join_s, members=[0], come=lambda me: [me])
    except ConfigError as error:
        raise ConfigError(
            f"{address}: cannot be listened at ({error}): choose another address of this machine, or another port"
        ) from None
    with _closing(runtime):
        allocator = _Seats(runtime, run, join_s)
        runtime.launch(allocator.listen()).wait()
        host, port = runtime.view.transport.me.host_and_port
        yield runtime, Address(address.host if endpoint.advertise is None else host, port)


@contextmanager
def attending(
    address: Address,
    endpoint: Endpoint = Endpoint(),
    *,
    patience_s: float,
    join_s: float = 30.0,
    pace: DeviceProfile | None = None,
    seed: int = 0,
) -> Iterator[WallRuntime]:
    """A device's seat in the run whose coordinator is met at an address.

    Args:
      address: of it.
      endpoint: how this device connects to the others.
      patience_s: how long to try, in seconds.
      join_s: how long the coordinator may take to greet, in seconds.
      pace: of a slower device that is to be kept.
      seed: of its stragglers.

    Raises:
      DeadlinePassed: no coordinator is reached at the address.
      ConfigError: no seat is free, or the coordinator refuses this device.
    """
    unlike = False

    def visit(question: Mapping[str, Json], within_s: float) -> Mapping[str, Any]:
        def ask() -> dict[str, Any]:
            nonlocal unlike
            encrypted = endpoint.on(partial(route_to, address.host)).encrypts != unlike
            try:
                return Access(_KEY, encrypted, ()).ask(str(address), question, _VISIT_S)
            except (TimeoutError, ssl.SSLError):
                # One that encrypts where this device does not, or the reverse, refuses it and says why.
                unlike = not unlike
                raise

        return reached(ask, f"a coordinator at {address}", within_s)

    def come(me: Peer) -> list[Peer]:
        match visit({"peer": me.to_json()}, join_s):
            case {"peer": str(text)} if (peer := Peer.from_json(text)).rank == 0:
                return [peer, me]
            case {"refused": str(why)}:
                raise ConfigError(f"the coordinator at {address} refuses this device: {why}")
            case _:
                raise PeerLost(0, "this device took too long to come")

    match visit({"seat": True}, patience_s):
        case {"run": str(run), "rank": int(rank)} if 0 < rank < SEATS:
            slowdown = None if pace is None else Pace(pace, rank, seed)
        case answer:
            raise ConfigError(f"{address}: {answer.get('refused', 'no coordinator answers there')}")
    own_endpoint = endpoint.on(partial(route_to, address.host))
    runtime = _runtime(rank, run, own_endpoint, join_s, members=[0, rank], come=come, pace=slowdown)
    with _closing(runtime):
        yield runtime


@contextmanager
def _closing(runtime: WallRuntime) -> Iterator[None]:
    """Closes a runtime at the end, with the error where there is one."""
    try:
        yield
    except BaseException as error:
        runtime.close(error)
        raise
    runtime.close()


def take_part(
    address: Address,
    holding: Holding,
    endpoint: Endpoint = Endpoint(),
    *,
    patience_s: float = 600.0,
    join_s: float = 30.0,
    pace: DeviceProfile | None = None,
    seed: int = 0,
    met: Callable[[Device, WallRuntime], object] = lambda device, runtime: None,
) -> str:
    """Takes part in the run that is met at an address, until its coordinator ends it.

    A coordinator that is lost may come again there: the device waits for it, and brings the blocks that it has made.

    Args:
      address: of the coordinator.
      holding: what the device brings.
      endpoint: how it connects to the other devices.
      patience_s: how long to wait for a coordinator that is not there or silent, in seconds.
      join_s: how long greetings may take, in seconds.
      pace: of a slower device that is to be kept.
      seed: of its stragglers.
      met: is given the device and its world each time that a coordinator is met; see
        :meth:`farflung.coded.device.Device.leave`.

    Returns:
      Why it ends; empty: training is over.

    Raises:
      DeadlinePassed: no coordinator is met.
      ConfigError: there is no such host, or see :func:`attending`.
    """
    check_host(address.host, str(address))
    endpoint.read_keys()
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            remaining_s = max(0.0, deadline_s - time.monotonic())
            with attending(
                address, endpoint, patience_s=remaining_s, join_s=join_s, pace=pace, seed=seed
            ) as runtime:
                device = Device(
                    runtime,
                    holding,
                    admit=partial(admitted, runtime, join_s=join_s),
                )
                met(device, runtime)
                try:
                    return runtime.drive(device.run())
                finally:
                    deadline_s = time.monotonic() + patience_s
        except (PeerLost, PeerFailed, DeadlinePassed):
            if time.monotonic() >= deadline_s:
                raise
        time.sleep(_RETRY_S)


def admitted(runtime: WallRuntime, rank: int, said: str | None, *, join_s: float = 30.0) -> Pending[None]:
    """Lets a device in of which the coordinator has told; on the communication thread.

    Args:
      runtime: that of a device.
      rank: of the other.
      said: how it is reached, see :meth:`farflung.comm.Peer.to_json`.
      join_s: how long it may take to greet, in seconds.

    Returns:
      Fails where it does not come, or may not.
    """
    try:
        peer = Peer.from_json(said or "")
        if peer.rank != rank:
            raise ProtocolError(f"rank {peer.rank} was announced as rank {rank}")
        return runtime.let_in(peer, join_s)
    except FarflungError as error:
        return failed(error)


def _runtime(rank: int, run: str, endpoint: Endpoint, join_s: float, **more: Any) -> WallRuntime:
    settings: dict[str, Json] = {"coded run": run}
    return WallRuntime(rank, SEATS, None, endpoint=endpoint, settings=settings, join_s=join_s, **more)


class _Seats:
    """Gives devices ranks and lets them in; on the communication thread.

    A question is a JSON object: ``seat``, of a device that comes; ``peer``, how one that has a rank is reached.
    """

    def __init__(self, runtime: WallRuntime, run: str, join_s: float) -> None:
        self._runtime, self._run, self._join_s = runtime, run, join_s
        self._free = deque(range(1, SEATS))
        self._due: dict[int, float] = {}
        """Until when each device that has a seat may take to greet, by rank."""

    async def listen(self) -> None:
        """Answers from now on."""
        self._runtime.view.transport.receive(_KEY, partial(answered, self._find))

    def _find(self, question: object) -> Mapping[str, Json]:
        match question:
            case {"seat": True}:
                return {"run": self._run, "rank": self._give()}
            case {"peer": str(text)}:
                peer = Peer.from_json(text)
                if self._due.get(peer.rank, 0.0) <= self._runtime.now():
                    return {}  # it has no seat, or not any more
                admitted_peer = self._runtime.peers.get(peer.rank)
                if admitted_peer is None:
                    self._runtime.let_in(peer, self._join_s)
                    self._due[peer.rank] = self._runtime.now() + self._join_s
                elif admitted_peer != peer:
                    raise ConfigError(f"rank {peer.rank} has come already")
                return {"peer": self._runtime.view.transport.me.to_json()}
            case _:
                raise ValueError("no question")

    def _give(self) -> int:
        present_ranks, time_s = self._runtime.view.present(), self._runtime.now()
        for rank in [rank for rank, deadline_s in self._due.items() if rank not in present_ranks and time_s >= deadline_s]:
            del self._due[rank]
            self._runtime.peers.pop(rank, None)
            self._free.append(rank)  # one that was left lately comes last: not all may have seen that it was
        if not self._free:
            raise ConfigError(f"all {SEATS - 1} seats of the run are taken: try again when a device has left")
        rank = self._free.popleft()
        self._due[rank] = time_s + self._join_s
        return rank
