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

from farflung.coded.blocks import BlockStore
from farflung.coded.device import Device
from farflung.comm import Endpoint, Peer
from farflung.comm.endpoint import UNREACHABLE, parse_advertised
from farflung.comm.interface import check_host, find_local_address
from farflung.comm.visits import Access, process_question
from farflung.devices import DeviceProfile
from farflung.errors import ConfigError, DeadlinePassed, FarflungError, PeerFailed, PeerLost, ProtocolError
from farflung.tasks import Pending, create_failed
from farflung.types import Json
from farflung.wall import Pace, WallRuntime
from farflung.wall.stores import retry_connect

__all__ = ["MAX_PROCESSES", "Address", "admit_device", "connect_device", "run_device", "start_coordinator"]

MAX_PROCESSES = 256
"""Maximum number of processes at a time, including the coordinator."""
_KEY = hashlib.sha256(b"farflung coded").digest()
"""Key of all runs, which is no secret: the endpoint's keys decide who may take part."""
_VISIT_TIMEOUT_S = 5.0
"""Maximum duration of a visit."""
_RETRY_DELAY_S = 0.5
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
    def parse(text: str) -> Address:
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
def start_coordinator(
    address: Address, run: str, endpoint: Endpoint = Endpoint(), *, connect_timeout_s: float = 30.0
) -> Iterator[tuple[WallRuntime, Address]]:
    """Starts rank 0 of a run, admits devices, and yields its runtime and public address.

    Args:
      address: Address at which devices visit.
      run: Name of the run.
      endpoint: Settings of connections to devices; its interface and port are replaced by those of the address.
      connect_timeout_s: Maximum time between the rank and the greeting of a device, in seconds.

    Raises:
      ConfigError: there is no such host, or the address cannot be used.
    """
    check_host(address.host, str(address))
    if endpoint.advertise == UNREACHABLE:
        raise ConfigError(
            f"--advertise {UNREACHABLE}: devices connect to the coordinator, so it has to be reached"
        )
    if endpoint.advertise is not None:
        parse_advertised(endpoint.advertise, address.port or 1)
    endpoint.read_keys()
    (_, _, _, _, (interface, *_)), *_ = socket.getaddrinfo(address.host, None, type=socket.SOCK_STREAM)
    endpoint = replace(endpoint, interface=str(interface), port=address.port)
    try:
        runtime = _create_runtime(0, run, endpoint, connect_timeout_s, members=[0], announce=lambda me: [me])
    except ConfigError as error:
        raise ConfigError(
            f"{address}: cannot be listened at ({error}): choose another address of this machine, or another port"
        ) from None
    with _close_at_exit(runtime):
        allocator = _RankAllocator(runtime, run, connect_timeout_s)
        runtime.launch(allocator.listen()).wait()
        host, port = runtime.session.transport.local_peer.host_and_port
        yield runtime, Address(address.host if endpoint.advertise is None else host, port)


@contextmanager
def connect_device(
    address: Address,
    endpoint: Endpoint = Endpoint(),
    *,
    patience_s: float,
    connect_timeout_s: float = 30.0,
    pace: DeviceProfile | None = None,
    seed: int = 0,
) -> Iterator[WallRuntime]:
    """Connects a device to the run whose coordinator is at an address, and yields its runtime.

    Args:
      address: Address of the coordinator.
      endpoint: Settings of connections to the other devices.
      patience_s: Time for which the coordinator is tried, in seconds.
      connect_timeout_s: Maximum time for the coordinator's greeting, in seconds.
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
            encrypted = (
                endpoint.resolve_interface(partial(find_local_address, address.host)).needs_encryption
                != is_mismatched
            )
            try:
                return Access(_KEY, encrypted, ()).ask(str(address), question, _VISIT_TIMEOUT_S)
            except (TimeoutError, ssl.SSLError):
                # A coordinator refuses a device with the other setting of encryption, and says why.
                is_mismatched = not is_mismatched
                raise

        return retry_connect(ask, f"a coordinator at {address}", within_s)

    def find_peers(me: Peer) -> list[Peer]:
        match visit({"peer": me.to_json()}, connect_timeout_s):
            case {"peer": str(text)} if (peer := Peer.from_json(text)).rank == 0:
                return [peer, me]
            case {"refused": str(why)}:
                raise ConfigError(f"the coordinator at {address} refuses this device: {why}")
            case _:
                raise PeerLost(0, "this device took too long to come")

    match visit({"seat": True}, patience_s):
        case {"run": str(run), "rank": int(rank)} if 0 < rank < MAX_PROCESSES:
            slowdown = None if pace is None else Pace(pace, rank, seed)
        case answer:
            raise ConfigError(f"{address}: {answer.get('refused', 'no coordinator answers there')}")
    own_endpoint = endpoint.resolve_interface(partial(find_local_address, address.host))
    runtime = _create_runtime(
        rank, run, own_endpoint, connect_timeout_s, members=[0, rank], announce=find_peers, pace=slowdown
    )
    with _close_at_exit(runtime):
        yield runtime


@contextmanager
def _close_at_exit(runtime: WallRuntime) -> Iterator[None]:
    """Closes a runtime at the end, with the error if there is one."""
    try:
        yield
    except BaseException as error:
        runtime.close(error)
        raise
    runtime.close()


def run_device(
    address: Address,
    store: BlockStore,
    endpoint: Endpoint = Endpoint(),
    *,
    patience_s: float = 600.0,
    connect_timeout_s: float = 30.0,
    pace: DeviceProfile | None = None,
    seed: int = 0,
    on_connect: Callable[[Device, WallRuntime], object] = lambda device, runtime: None,
) -> str:
    """Takes part in the run at an address, until its coordinator ends it.

    If the coordinator is lost, the device waits for a restarted one, and brings the blocks that it has built.

    Args:
      address: Address of the coordinator.
      store: Data and blocks of the device.
      endpoint: Settings of connections to the other devices.
      patience_s: Time for which a silent or absent coordinator is tried, in seconds.
      connect_timeout_s: Maximum time for greetings, in seconds.
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
            with connect_device(
                address,
                endpoint,
                patience_s=remaining_s,
                connect_timeout_s=connect_timeout_s,
                pace=pace,
                seed=seed,
            ) as runtime:
                device = Device(
                    runtime,
                    store,
                    admit=partial(admit_device, runtime, connect_timeout_s=connect_timeout_s),
                )
                on_connect(device, runtime)
                try:
                    return runtime.drive(device.run())
                finally:
                    deadline_s = time.monotonic() + patience_s
        except (PeerLost, PeerFailed, DeadlinePassed):
            if time.monotonic() >= deadline_s:
                raise
        time.sleep(_RETRY_DELAY_S)


def admit_device(
    runtime: WallRuntime, rank: int, peer_json: str | None, *, connect_timeout_s: float = 30.0
) -> Pending[None]:
    """Admits a device that the coordinator has announced with its address; on the communication thread.

    Args:
      runtime: Runtime of this device.
      rank: Rank of the other device.
      peer_json: Address of the other device, see :meth:`farflung.comm.Peer.to_json`.
      connect_timeout_s: Maximum time for its greeting, in seconds.

    Returns:
      Completion, which fails if the device does not connect or is refused.
    """
    try:
        peer = Peer.from_json(peer_json or "")
        if peer.rank != rank:
            raise ProtocolError(f"rank {peer.rank} was announced as rank {rank}")
        return runtime.admit(peer, connect_timeout_s)
    except FarflungError as error:
        return create_failed(error)


def _create_runtime(
    rank: int, run: str, endpoint: Endpoint, connect_timeout_s: float, **options: Any
) -> WallRuntime:
    settings: dict[str, Json] = {"coded run": run}
    return WallRuntime(
        rank,
        MAX_PROCESSES,
        None,
        endpoint=endpoint,
        settings=settings,
        connect_timeout_s=connect_timeout_s,
        **options,
    )


class _RankAllocator:
    """Assigns ranks to devices and admits them; on the communication thread.

    A request is a JSON object: ``seat`` asks for a rank, and ``peer`` reports the address of a ranked device.
    """

    def __init__(self, runtime: WallRuntime, run: str, connect_timeout_s: float) -> None:
        self._runtime, self._run, self._connect_timeout_s = runtime, run, connect_timeout_s
        self._free_ranks = deque(range(1, MAX_PROCESSES))
        self._join_deadlines: dict[int, float] = {}
        """Deadline of each assigned rank for its greeting."""

    async def listen(self) -> None:
        """Starts to answer visits."""
        self._runtime.session.transport.accept_visits(_KEY, partial(process_question, self._handle_request))

    def _handle_request(self, request: object) -> Mapping[str, Json]:
        match request:
            case {"seat": True}:
                return {"run": self._run, "rank": self._allocate_rank()}
            case {"peer": str(text)}:
                peer = Peer.from_json(text)
                if self._join_deadlines.get(peer.rank, 0.0) <= self._runtime.read_clock():
                    return {}  # it has no rank, or has lost it
                admitted_peer = self._runtime.peers.get(peer.rank)
                if admitted_peer is None:
                    self._runtime.admit(peer, self._connect_timeout_s)
                    self._join_deadlines[peer.rank] = self._runtime.read_clock() + self._connect_timeout_s
                elif admitted_peer != peer:
                    raise ConfigError(f"rank {peer.rank} has come already")
                return {"peer": self._runtime.session.transport.local_peer.to_json()}
            case _:
                raise ValueError("no question")

    def _allocate_rank(self) -> int:
        ranks, time_s = self._runtime.session.members.present_ranks, self._runtime.read_clock()
        for rank in [
            rank for rank, end_s in self._join_deadlines.items() if rank not in ranks and time_s >= end_s
        ]:
            del self._join_deadlines[rank]
            self._runtime.peers.pop(rank, None)
            self._free_ranks.append(rank)  # last in line, as some devices may not have seen the loss yet
        if not self._free_ranks:
            raise ConfigError(
                f"all {MAX_PROCESSES - 1} seats of the run are taken: try again when a device has left"
            )
        rank = self._free_ranks.popleft()
        self._join_deadlines[rank] = time_s + self._connect_timeout_s
        return rank
