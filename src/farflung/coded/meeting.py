"""Where coordinator and devices of real processes find each other: a store at the coordinator's address.

A device asks for a seat there. The coordinator gives it a rank, admits it when it has published its address, and takes
the seat back when the device is gone or has not greeted in time. A coordinator that comes again makes a new store, and
devices that have lost theirs ask for a seat in that.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from farflung.coded.blocks import Holding
from farflung.coded.device import Device
from farflung.comm import Endpoint
from farflung.comm.interface import check_host, route_to
from farflung.devices import DeviceProfile
from farflung.errors import ConfigError, DeadlinePassed, PeerFailed, PeerLost, RunLost
from farflung.tasks import Pending
from farflung.wall import Pace, WallRuntime
from farflung.wall.stores import published, reached, serving

__all__ = ["Address", "attending", "coordinating", "take_part"]

SEATS = 256
"""How many processes may be there at a time, the coordinator among them."""
_RUN, _ASKED = "farflung/coded/run", "farflung/coded/asked"
_LOOK_S = 0.1
"""Seconds between two looks of the coordinator for new processes."""
_STORE_S = 5.0
"""How long a store may take to say what it has."""
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
    """Rank 0 of a run, and where it is met; devices that come are admitted.

    Args:
      address: to be met at.
      run: its name.
      endpoint: how it connects to devices.
      join_s: how long a device may take from its seat to its greeting, in seconds.

    Raises:
      ConfigError: there is no such host, or the address cannot be used.
    """
    check_host(address.host, str(address))
    try:
        store = serving(address.host, address.port)
    except OSError as error:
        raise ConfigError(
            f"{address}: cannot be listened at ({os.strerror(error.errno or 0)}): choose another address of this "
            "machine, or another port"
        ) from None
    store.set(_RUN, run)
    store.add(_ASKED, 0)
    runtime = _runtime(0, run, store, endpoint, address, join_s, members=[0])
    ended = threading.Event()
    porter = threading.Thread(
        target=partial(_let_in, runtime, store, ended, join_s), name="farflung-porter", daemon=True
    )
    porter.start()
    with _closing(runtime):
        try:
            yield runtime, Address(address.host, store.port)
        finally:
            ended.set()
            porter.join()


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
      ConfigError: no seat is free.
    """
    store = _reached(address, patience_s)
    run = store.get(_RUN).decode(errors="replace")
    until = time.monotonic() + join_s
    asked = store.add(_ASKED, 1)
    _wait(store, _seat(asked), join_s)
    rank = int(store.get(_seat(asked)))
    if not rank:
        raise ConfigError(
            f"{address}: all {SEATS - 1} seats of the run are taken: try again when a device has left"
        )
    kept = None if pace is None else Pace(pace, rank, seed)
    runtime = _runtime(rank, run, store, endpoint, address, join_s, members=[rank], pace=kept)
    with _closing(runtime):
        _wait(store, _open(asked), until - time.monotonic())
        runtime.admit(0, join_s=join_s).wait()
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
    until = time.monotonic() + patience_s
    while True:
        try:
            left_s = max(0.0, until - time.monotonic())
            with attending(
                address, endpoint, patience_s=left_s, join_s=join_s, pace=pace, seed=seed
            ) as runtime:
                device = Device(
                    runtime,
                    holding,
                    admit=partial(_admit, runtime, join_s=join_s),
                    opened=lambda: runtime.launch(_opened(runtime)),
                    patience_s=patience_s,
                )
                met(device, runtime)
                try:
                    return runtime.drive(device.run())
                finally:
                    until = time.monotonic() + patience_s
        except (PeerLost, PeerFailed, DeadlinePassed):
            if time.monotonic() >= until:
                raise
        time.sleep(_RETRY_S)


def _admit(runtime: WallRuntime, rank: int, *, join_s: float) -> Pending[None]:
    """Admits a device of which the coordinator has told: it has been there, so where its address is gone, it is too.

    Args:
      runtime: that of a device.
      rank: of the other.
      join_s: how long it may take to greet, in seconds.

    Returns:
      Fails with :class:`PeerLost` where it is gone.
    """
    met: Pending[None] = Pending()

    def look(there: Pending[bool]) -> None:
        if there.error is None and there.result():
            met.follow(runtime.admit(rank, join_s=join_s))
        else:
            met.fail(PeerLost(rank, "it has left the run"))

    runtime.aside(lambda: runtime.has_come(rank)).on_done(look)
    return met


async def _opened(runtime: WallRuntime) -> None:
    """Waits until all that :func:`_admit` was asked for so far may come."""
    for _ in range(2):  # behind the look whether each is there, and behind what lets it in
        await runtime.aside(lambda: None)


def _runtime(
    rank: int, run: str, store: dist.Store, endpoint: Endpoint, address: Address, join_s: float, **more: Any
) -> WallRuntime:
    return WallRuntime(
        rank,
        SEATS,
        store,
        endpoint=endpoint.on(partial(route_to, address.host)),
        settings={"coded run": run},
        join_s=join_s,
        **more,
    )


def _reached(address: Address, patience_s: float) -> dist.Store:
    """The store of a coordinator that is there and has said what it runs."""

    def connect() -> dist.Store:
        return dist.TCPStore(address.host, address.port, is_master=False, timeout=timedelta(seconds=_STORE_S))

    store = reached(address.host, address.port, connect, f"a coordinator at {address}", patience_s)
    _wait(store, _RUN, _STORE_S)
    return store


def _let_in(runtime: WallRuntime, store: dist.Store, ended: threading.Event, join_s: float) -> None:
    """Gives devices the seats that they ask for, admits those that have published their address, and takes seats back,
    as long as the run goes on.
    """
    free = deque(range(1, SEATS))  # a seat that was left lately comes last: not all may have seen that it was
    coming: dict[int, tuple[int, float]] = {}
    """By rank, which request it was given for, and until when it may publish an address."""
    admitted: dict[int, Pending[None]] = {}
    heard = 0
    while not ended.wait(_LOOK_S):
        try:
            newest = min(store.add(_ASKED, 0), heard + SEATS)
            for asked in range(heard + 1, newest + 1):
                rank = free.popleft() if free else 0
                if rank:
                    coming[rank] = asked, runtime.now() + join_s
                store.set(_seat(asked), str(rank))
            heard = newest
            come = [rank for rank in coming if runtime.has_come(rank)]
            for rank in come:
                admitted[rank] = runtime.admit(rank, join_s=join_s)
            if come:
                runtime.aside(
                    lambda: None
                ).wait()  # until then they would knock at a door that is not open yet
                for rank in come:
                    asked, _ = coming.pop(rank)
                    store.set(_open(asked), "")
            late = [rank for rank, (_, until) in coming.items() if runtime.now() >= until]
            settled = [rank for rank, greeted in admitted.items() if greeted.done]
            present = runtime.launch(_present(runtime)).wait()
            for rank in (*late, *(rank for rank in settled if rank not in present)):
                coming.pop(rank, None)
                admitted.pop(rank, None)
                runtime.forget(rank)
                free.append(rank)
        except (RuntimeError, RunLost):  # the store or the run has ended
            return


async def _present(runtime: WallRuntime) -> set[int]:
    """The ranks that are there; the view belongs to the thread that this is launched on."""
    return runtime.view.present()


def _seat(asked: int) -> str:
    """The place of the rank that a device is given; 0: no seat is free."""
    return f"farflung/coded/seat/{asked}"


def _open(asked: int) -> str:
    """Says that a device may greet."""
    return f"farflung/coded/open/{asked}"


def _wait(store: dist.Store, key: str, join_s: float) -> None:
    why = ""
    try:
        if published(store, key, join_s):
            return
    except RuntimeError as error:  # the store has ended
        why = f" ({type(error).__name__})"
    raise DeadlinePassed(0, f"its coordinator to let it in{why}", join_s)
