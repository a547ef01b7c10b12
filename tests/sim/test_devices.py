"""Virtual time charges what a device profile says: layers, stragglers, and each replica its own."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest

from farflung.config import Training
from farflung.devices import (
    DeviceProfile,
    LayerProfile,
    OccasionalStraggler,
    ScheduledStraggler,
    VaryingStraggler,
)
from farflung.errors import ConfigError
from farflung.loop import Replica
from farflung.network import Link, NetworkProfile, Site, SiteLink, find_network
from farflung.recipes import parse_recipe
from farflung.sim import VirtualWorld
from farflung.telemetry import Event, Telemetry
from farflung.types import Cost, Runtime
from farflung.workloads import create_workload

pytestmark = pytest.mark.usefixtures("unframed")

LAYERS = (LayerProfile(10, 0.25, 0.5), LayerProfile(0, 0.5, 1.0), LayerProfile(6, 0.25, 2.5))


async def one_step(runtime: Runtime) -> list[tuple[str, float]]:
    """What happens when in a step of two samples, whose buckets hold 4, 2 and 10 parameters."""
    seen: list[tuple[str, float]] = []

    def fill(ready: Callable[[int], None]) -> None:
        for bucket in range(3):
            ready(bucket)

    await runtime.compute(Cost("forward", 2), lambda: None)
    seen.append(("forward", runtime.read_clock()))
    cost = Cost("backward", 2, (4, 2, 10))
    await runtime.run_backward(
        cost, fill, lambda bucket: seen.append((f"bucket {bucket}", runtime.read_clock()))
    )
    seen.append(("backward", runtime.read_clock()))
    await runtime.compute(Cost("optimizer", 0), lambda: None)
    seen.append(("optimizer", runtime.read_clock()))
    return seen


def test_buckets_are_ready_when_their_layers_are() -> None:
    world = VirtualWorld(1, device=DeviceProfile(layers=LAYERS, optimizer_s=0.125))
    (seen,) = world.run([one_step(runtime) for runtime in world.runtimes])
    assert seen == [
        ("forward", 2.0),
        ("bucket 0", 7.0),
        ("bucket 1", 7.0),
        ("bucket 2", 10.0),
        ("backward", 10.0),
        ("optimizer", 10.125),
    ]


def test_each_replica_has_its_device() -> None:
    devices = [DeviceProfile(forward_s=0.5), DeviceProfile(forward_s=0.5, slowdown=3.0)]
    world = VirtualWorld(2, device=devices)
    ends = [seen[-1][1] for seen in world.run([one_step(runtime) for runtime in world.runtimes])]
    assert ends == [3.0, 9.0]


def test_a_step_is_slow_as_a_whole_and_by_when_it_begins() -> None:
    device = DeviceProfile(forward_s=0.5, stragglers=(ScheduledStraggler(1.0, 2.0, 2.0),))
    world = VirtualWorld(1, device=device)
    (seen,) = world.run([one_step(runtime) for runtime in world.runtimes])
    assert (seen[0], seen[-1]) == (("forward", 1.0), ("optimizer", 5.0))  # the backward pass began at 1

    slow = DeviceProfile(forward_s=0.5, stragglers=(OccasionalStraggler(0.5, 2.0),))
    world = VirtualWorld(50, device=slow, seed=4)
    found = {
        (seen[0][1], seen[-1][1]) for seen in world.run([one_step(runtime) for runtime in world.runtimes])
    }
    assert found == {(1.0, 3.0), (2.0, 6.0)}


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"device": DeviceProfile(), "seconds_per_sample": 1.0}, "not both"),
        ({"device": [DeviceProfile()] * 3}, "3 device profiles for 2 replicas"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        VirtualWorld(2, **arguments)


# --- whole runs -------------------------------------------------------------------------------------------------


def trained(world: VirtualWorld, steps: int = 3, schedule: str = "synchronous") -> list[Event]:
    """The events of a small run, in the order they happened."""
    work = create_workload("synthetic/quadratic")
    training = Training.resolve(work.defaults, {"steps": steps, "batch_size": 4, "seed": 1})
    events: list[Event] = []
    made = [
        Replica(
            runtime,
            work,
            training,
            parse_recipe("synchronous").with_components(schedule=schedule).build_components(training.seed),
            Telemetry(runtime.comm.rank, events.append),
        )
        for runtime in world.runtimes
    ]
    world.run([replica.run() for replica in made])
    return events


WORLDS: dict[str, dict[str, Any]] = {
    "links": {"network": find_network("shanghai-boston"), "device": DeviceProfile(forward_s=1e-3)},
    "phones": {
        "network": find_network("4g"),
        "device": DeviceProfile(
            forward_s=1e-3, stragglers=(VaryingStraggler(0.5), OccasionalStraggler(0.2, 5.0))
        ),
    },
}


@pytest.mark.parametrize("settings", WORLDS.values(), ids=WORLDS)
def test_the_same_seed_gives_the_same_telemetry_byte_for_byte(settings: dict[str, Any]) -> None:
    def telemetry(seed: int) -> bytes:
        lines = io.StringIO()
        for event in trained(VirtualWorld(4, seed=seed, **settings)):
            lines.write(json.dumps(event) + "\n")
        return lines.getvalue().encode()

    first = telemetry(1)
    assert first == telemetry(1)
    assert first != telemetry(2)


def test_a_network_with_sites() -> None:
    far = SiteLink("a", "b", Link(0.5)), SiteLink("b", "a", Link(0.5))
    network = NetworkProfile("x", (Site("a", 1), Site("b", 1)), far)
    events = trained(VirtualWorld(2, network=network, device=DeviceProfile(forward_s=0.25)), steps=2)
    steps = [event for event in events if event["event"] == "step"]
    # Four samples: 1 s forward, 2 s backward, then the one-way delay of an exchange between two.
    assert sorted({event["t"] for event in steps}) == [3.5, 7.0]  # type: ignore[type-var]
    assert {event["exposed_s"] for event in steps} == {0.5}
