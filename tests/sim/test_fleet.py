"""Classes of devices take the time of every single device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from farflung.comm import ExchangeChannel
from farflung.devices import CodingRates, DeviceProfile, Scheduled, Varying
from farflung.errors import ConfigError, UnknownName
from farflung.network import Link, Medium, NetworkProfile, Site
from farflung.reducers import CodecReducer
from farflung.sim import VirtualWorld, time_fleet
from farflung.types import CodecState, Contribution, Cost, Runtime, StateSlot

pytestmark = pytest.mark.usefixtures("unframed")

FLEET = NetworkProfile(
    "fleet",
    (
        Site("server", 1, up_bps=9e6, down_bps=7e6),
        Site("phones", 4, up_bps=1.1e6, down_bps=3e6, medium="cell"),
        Site("cameras", 3, Link(0.002), exit_bps=2e6, entry_bps=2e6),
    ),
    media=(Medium("cell", 3.3e6),),
    default=Link(0.021),
)
DEVICES = [
    DeviceProfile("s", 0.001),
    DeviceProfile("p", 0.011, optimizer_s=0.003, stragglers=(Scheduled(0.5, 1.5, 2.0),)),
    DeviceProfile("c", 0.007),
]


def one_by_one(
    collective: str,
    numel: int,
    batch_size: int,
    steps: int,
    classes: Sequence[DeviceProfile] = DEVICES,
    fleet: NetworkProfile = FLEET,
) -> list[float]:
    """The same, with a replica for each device, message by message."""
    devices = [classes[site] for site in range(3) for _ in fleet.span(site)]
    world = VirtualWorld(8, network=fleet, device=devices, closed_form=False)

    async def body(runtime: Runtime) -> list[float]:
        ends = []
        for step in range(steps):
            await runtime.compute(Cost("forward", batch_size), lambda: None)
            await runtime.backward(Cost("backward", batch_size), lambda ready: None, lambda bucket: None)
            channel = ExchangeChannel(runtime.comm, step, 0)
            own = Contribution(torch.zeros(numel), 1.0, torch.zeros(5, dtype=torch.float64))
            await CodecReducer(collective=collective).reduce(channel, StateSlot(CodecState()), own, step=step)
            await channel.computed()
            await runtime.compute(Cost("optimizer", 0), lambda: None)
            ends.append(runtime.now())
        return ends

    each = world.run([body(runtime) for runtime in world.runtimes])
    return [max(ends) for ends in zip(*each, strict=True)]


@pytest.mark.parametrize("collective", ["parameter_server", "multi_parameter_server", "direct"])
@pytest.mark.parametrize("numel", [5, 20_011])
def test_as_one_by_one(collective: str, numel: int) -> None:
    found = time_fleet(FLEET, DEVICES, numel=numel, batch_size=4, steps=5, collective=collective)
    assert found.ends_s == pytest.approx(one_by_one(collective, numel, 4, 5), rel=1e-12)
    assert found.devices == 8
    assert found.step_s == found.ends_s[-1] / 5


@pytest.mark.parametrize("control", ["bbr", "reno"])
def test_connections_between_classes_find_their_rate_alike(control: Any) -> None:
    ideal = FLEET.scaled(latency=10.0, bandwidth=100.0)
    fleet = replace(ideal, congestion=control)
    found = time_fleet(fleet, DEVICES, numel=200_011, batch_size=4, steps=3, collective="direct").ends_s
    assert found == pytest.approx(one_by_one("direct", 200_011, 4, 3, fleet=fleet), rel=1e-12)
    assert (
        found > time_fleet(ideal, DEVICES, numel=200_011, batch_size=4, steps=3, collective="direct").ends_s
    )


ADDING = CodingRates({("add", ""): ((1, 3e-7), (10**6, 0.3)), ("scale", ""): ((1, 1e-7), (10**6, 0.1))})
EVERYTHING = replace(
    ADDING,
    operations={**ADDING.operations, ("copy", ""): ((1, 5e-8), (10**6, 0.05))},
    message_s=50e-6,
    copy_s_per_byte=1e-9,
    encrypt_s_per_byte=4e-9,
)


@pytest.mark.parametrize("collective", ["parameter_server", "multi_parameter_server", "direct"])
@pytest.mark.parametrize("numel", [5, 20_011])
@pytest.mark.parametrize(("coding", "within"), [(ADDING, 1e-12), (EVERYTHING, 1e-3)], ids=["add", "all"])
def test_devices_that_code(collective: str, numel: int, coding: CodingRates, within: float) -> None:
    classes = [replace(device, coding=coding, cores=1 + site % 2) for site, device in enumerate(DEVICES)]
    found = time_fleet(FLEET, classes, numel=numel, batch_size=4, steps=5, collective=collective)
    assert found.ends_s == pytest.approx(one_by_one(collective, numel, 4, 5, classes), rel=within)
    assert (
        found.ends_s
        > time_fleet(FLEET, DEVICES, numel=numel, batch_size=4, steps=5, collective=collective).ends_s
    )


def test_a_million_devices_by_hand() -> None:
    million = NetworkProfile(
        "million", (Site("server", 1, down_bps=8e9), Site("phones", 999_999, up_bps=8e3)), default=Link(0.5)
    )
    times = time_fleet(
        million, DeviceProfile(forward_s=0.25), numel=250, batch_size=4, steps=3, side_nbytes=0
    )
    # 3 s of computation; 999,999 kB at a GB/s, no faster than a kB in a second each; back without a limit.
    assert times.ends_s == pytest.approx([5.0, 10.0, 15.0], rel=1e-12)
    assert times.classes == 2


@pytest.mark.parametrize(
    ("changed", "error", "what"),
    [
        ({"collective": "ring"}, UnknownName, "unknown collective for classes 'ring'"),
        ({"devices": DEVICES[:2]}, ConfigError, "2 device profiles for 3 sites"),
        (
            {"network": NetworkProfile.uniform(Link(0.1))},
            ConfigError,
            "uniform: the number of nodes is not set",
        ),
        ({"network": NetworkProfile.uniform(Link(0.1, jitter_s=0.1), 2)}, ConfigError, "uniform: jitter_s"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], error: type[Exception], what: str) -> None:
    settings: dict[str, Any] = {"network": FLEET, "devices": DEVICES, "numel": 1, "batch_size": 1, "steps": 1}
    with pytest.raises(error, match=what):
        time_fleet(**{**settings, **changed})


def test_classes_are_slow_together_and_by_their_seed() -> None:
    devices = [DeviceProfile(forward_s=0.01, stragglers=(Varying(1.0),))] * 3

    def ends(seed: int) -> tuple[float, ...]:
        return time_fleet(FLEET, devices, numel=5, batch_size=4, steps=5, seed=seed).ends_s

    assert ends(1) == ends(1)
    assert ends(1) != ends(2)
