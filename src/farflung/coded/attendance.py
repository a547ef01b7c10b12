"""A device in a real process: it takes part, and where the coordinator is lost it comes back with what it holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from farflung.coded.blocks import Holding
from farflung.coded.device import Device
from farflung.coded.meeting import Address, admitted, attending, opened
from farflung.comm import Endpoint
from farflung.comm.interface import check_host
from farflung.devices import DeviceProfile
from farflung.errors import DeadlinePassed, PeerFailed, PeerLost
from farflung.wall import WallRuntime

__all__ = ["take_part"]

_RETRY_S = 0.5
"""How long a device that has lost its coordinator waits before it looks for another."""


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
      ConfigError: there is no such host, or see :func:`farflung.coded.meeting.attending`.
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
                    admit=partial(admitted, runtime, join_s=join_s),
                    opened=lambda: runtime.launch(opened(runtime)),
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
