"""Devices of coded training on another machine, whose cable goes dead without a word and comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from farflung.coded.coordinator import Coordinator, Settings
from farflung.coded.meeting import Address, start_coordinator
from farflung.types import Json
from tests.coded_processes import Crowd, Told, descend, difference, trained
from tests.helpers import PATIENCE_S
from tests.lab.netns import ip, two_machines

PARTITIONS, NEAR, FAR = 4, 4, 2
LIMIT_S = 120.0
SAME = 1e-6

pytestmark = [pytest.mark.lab, pytest.mark.thorough, pytest.mark.timeout(2 * LIMIT_S)]


@pytest.mark.parametrize("cut_at", ["ordered", "iterate"])
def test_a_cable_that_goes_dead_changes_nothing(cut_at: str, tmp_path: Path) -> None:
    """Once while data are encoded, for as long as it takes to train; once while products are made, for some of them.

    Two of the devices are at its other end, as many as may vanish.
    """
    some = Settings(
        partitions=PARTITIONS, devices=NEAR + FAR, redundancy=2, patience_s=2 * PATIENCE_S, min_timeout_s=0.3
    )
    notes = Told()
    with two_machines() as (near, far):

        def cut(*, dead: bool) -> None:
            ip("-n", far.name, "link", "set", far.cable, "down" if dead else "up")

        def hears(event: str, values: dict[str, Json]) -> None:
            del values
            if event == cut_at == "ordered":
                notes.listener = lambda event, values: None
                cut(dead=True)

        def at(iterate: int, weights: Tensor) -> None:
            del weights
            if cut_at == "iterate" and iterate in (10, 30):
                cut(dead=iterate == 10)

        notes.listener = hears
        context = near.inside(lambda: start_coordinator(Address(near.address, 0), "run"))
        runtime, address = near.inside(context.__enter__)
        crowd = Crowd(address, tmp_path)
        try:
            for place in range(NEAR + FAR):
                machine = near if place < NEAR else far
                crowd.join(place if place < PARTITIONS else None, namespace=machine.name)
            coordinator = Coordinator(runtime, some, run="run", record=notes)  # type: ignore[arg-type]

            async def body() -> Tensor:
                await coordinator.gather()
                labels = torch.cat([one.labels for one in coordinator.activate_partitions()])
                weights = await descend(coordinator.multiply, coordinator.multiply_transposed, labels, at)
                if cut_at == "ordered":
                    cut(dead=False)
                await coordinator.end()
                return weights

            weights = runtime.drive(body())
            left = crowd.left()
            context.__exit__(None, None, None)
        finally:
            crowd.close()
    print(f"{cut_at}: {difference(weights, trained(PARTITIONS)):.1e} after {runtime.read_clock():.1f} s")
    assert difference(weights, trained(PARTITIONS)) < SAME
    assert not notes.of("gone")
    assert {event["rank"] for event in notes.of("silent")} or cut_at == "iterate"
    assert not [one for one in left if (one["reason"], one["kept"], one["meetings"]) != ("", [], 1)]
