"""Connection of coordinator and devices in real processes, by visits to the coordinator's port.

A device visits the coordinator to get a rank. The coordinator admits it once its address is known, and frees
the rank if the device is gone or has not greeted in time. A restarted coordinator assigns ranks anew.
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
"""Maximum number of processes at a time, including the coordinator."""
_KEY = hashlib.sha256(b"farflung coded").digest()
"""Key of all runs, which is no secret: the endpoint's keys decide who may take part."""
_VISIT_S = 5.0
"""Maximum duration of a visit."""
_RETRY_S = 0.5
"""Delay after which a device that has lost its coordinator looks for another."""


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a coordinator.

    Args:
      host: Host name or address.
      port: Port; 0 is any free one, for the coordinator itself.
    """

    host: str
    port: int

    @staticmethod
    def of(text: str) -> Address:
        """Parses ``HOST:PORT``.

        Raises:
          ConfigError: the text has another form.
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
    """Starts rank 0 of a run, admits devices, and yields its runtime and public address.

    Args:
      address: Address at which devices visit.
      run: Name of the run.
      endpoint: Settings of connections to devices; its interface and port are replaced by those of the address.
      join_s: Maximum time between the rank and the greeting of a device, in seconds.

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
    """Connects a device to the run whose coordinator is at an address, and yields its runtime.

    Args:
      address: Address of the coordinator.
      endpoint: Settings of connections to the other devices.
      patience_s: Time for which the coordinator is tried, in seconds.
      join_s: Maximum time for the coordinator's greeting, in seconds.
      pace: Profile of a slower device to simulate.
      seed: Seed of its stragglers.

    Raises:
      DeadlinePassed: no coordinator is reached at the address.
      ConfigError: no rank is free, or the coordinator refuses this device.
    """
    is_mismatched = False

    def visit(question: Mapping[str, Json], within_s: float) -> Mapping[str, Any]:
        def ask() -> dict[str, Any]:
            nonlocal is_mismatched
            encrypted = endpoint.on(partial(route_to, address.host)).encrypts != is_mismatched
            try:
                return Access(_KEY, encrypted, ()).ask(str(address), question, _VISIT_S)
            except (TimeoutError, ssl.SSLError):
                # A coordinator refuses a device with the other setting of encryption, and says why.
                is_mismatched = not is_mismatched
                raise

        return reached(ask, f"a coordinator at {address}", within_s)

    def find_peers(me: Peer) -> list[Peer]:
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
    runtime = _runtime(rank, run, own_endpoint, join_s, members=[0, rank], come=find_peers, pace=slowdown)
    with _closing(runtime):
        yield runtime


@contextmanager
def _closing(runtime: WallRuntime) -> Iterator[None]:
    """Closes a runtime at the end, with the error if there is one."""
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
    """Takes part in the run at an address, until its coordinator ends it.

    If the coordinator is lost, the device waits for a restarted one, and brings the blocks that it has built.

    Args:
      address: Address of the coordinator.
      store: Data and blocks of the device.
      endpoint: Settings of connections to the other devices.
      patience_s: Time for which a silent or absent coordinator is tried, in seconds.
      join_s: Maximum time for greetings, in seconds.
      pace: Profile of a slower device to simulate.
      seed: Seed of its stragglers.
      on_connect: Function called with the device and its runtime after each connection to a coordinator; see
        :meth:`farflung.coded.device.Device.leave`.

    Returns:
      Reason for the end; empty if training is over.

    Raises:
      DeadlinePassed: no coordinator is reached.
      ConfigError: there is no such host, or see :func:`connect_device`.
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
    """Admits a device that the coordinator has announced; on the communication thread.

    Args:
      runtime: Runtime of this device.
      rank: Rank of the other device.
      peer_json: Address of the other device, see :meth:`farflung.comm.Peer.to_json`.
      join_s: Maximum time for its greeting, in seconds.

    Returns:
      Completion, which fails if the device does not connect or is refused.
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
    """Assigns ranks to devices and admits them; on the communication thread.

    A request is a JSON object: ``seat`` asks for a rank, and ``peer`` reports the address of a ranked device.
    """

    def __init__(self, runtime: WallRuntime, run: str, join_s: float) -> None:
        self._runtime, self._run, self._join_s = runtime, run, join_s
        self._free = deque(range(1, SEATS))
        self._due: dict[int, float] = {}
        """Deadline of each assigned rank for its greeting."""

    async def listen(self) -> None:
        """Starts to answer visits."""
        self._runtime.view.transport.receive(_KEY, partial(answered, self._find))

    def _find(self, question: object) -> Mapping[str, Json]:
        match question:
            case {"seat": True}:
                return {"run": self._run, "rank": self._give()}
            case {"peer": str(text)}:
                peer = Peer.from_json(text)
                if self._due.get(peer.rank, 0.0) <= self._runtime.now():
                    return {}  # it has no rank, or has lost it
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
        ranks, time_s = self._runtime.view.present(), self._runtime.now()
        for rank in [rank for rank, end_s in self._due.items() if rank not in ranks and time_s >= end_s]:
            del self._due[rank]
            self._runtime.peers.pop(rank, None)
            self._free.append(rank)  # last in line, as some devices may not have seen the loss yet
        if not self._free:
            raise ConfigError(f"all {SEATS - 1} seats of the run are taken: try again when a device has left")
        rank = self._free.popleft()
        self._due[rank] = time_s + self._join_s
        return rank
