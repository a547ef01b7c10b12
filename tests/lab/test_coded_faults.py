"""Devices on machines of their own, killed, stopped and cut off at any moment, and others that come: L-BFGS on a9a."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from farflung.coded import LBFGS, InMemoryProducts, Iterate, Logistic, Problem, solve
from farflung.coded.coordinator import Coordinator, Settings
from farflung.coded.meeting import Address, start_coordinator
from farflung.coded.parts import partition_rows
from farflung.data import a9a
from farflung.data.source import find
from tests.coded.problems import run
from tests.coded_plans import DEVICES, PARTITIONS, Plan
from tests.coded_processes import Crowd, Told
from tests.forks import Fork
from tests.helpers import PATIENCE_S
from tests.lab.netns import Machine, around_a_switch, ip

ROWS = 4_000
PLANS, FEW = 12, 5
MACHINES = DEVICES + 4
"""Those of devices that come later among them."""
LIMIT_S = 120.0
SAME = 1e-6

pytestmark = [pytest.mark.lab, pytest.mark.thorough, pytest.mark.timeout(2 * LIMIT_S)]


@dataclass
class Scattered(Crowd):
    """Each device on a machine of its own.

    Args:
      machines: as many as devices come.
    """

    machines: list[Machine] = field(default_factory=list)

    def join(self, number: int | None, **options: Any) -> Fork:
        return super().join(number, namespace=self.machines[len(self.forks)].name, **options)

    def machine(self, pid: int) -> Machine:
        """Where a process runs."""
        (place,) = [place for place, fork in enumerate(self.forks) if fork.pid == pid]
        return self.machines[place]


def part_in(folder: Path, number: int) -> tuple[Tensor, Tensor]:
    """Samples of one partition, and labels of -1 and 1."""
    with np.load(folder / f"part-{number}.npz") as arrays:
        return torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Tensor, Tensor]]:
    if find(a9a.SOURCE) is None:
        pytest.skip("a9a is not at hand")
    folder = tmp_path_factory.mktemp("a9a")
    train, _ = a9a.load()
    features, labels = (one[:ROWS].to(torch.float64).numpy() for one in (train.inputs, train.targets))
    for number, rows in enumerate(partition_rows(ROWS, PARTITIONS)):
        np.savez(folder / f"part-{number}.npz", x=features[rows], y=labels[rows])
    return partial(part_in, folder)


@pytest.fixture(scope="module")
def minimum(parts: Callable[[int], tuple[Tensor, Tensor]]) -> float:
    """Of the objective, where nothing goes wrong."""
    features, labels = (
        torch.cat(tensors) for tensors in zip(*(parts(number) for number in range(PARTITIONS)), strict=True)
    )
    problem = Problem(InMemoryProducts(features), Logistic(), labels[:, None])
    return run(solve(LBFGS(), problem, max_iterations=500)).objective


@pytest.mark.parametrize(
    "seed", [*range(FEW), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(FEW, PLANS))]
)
def test_the_minimum_is_that_without_losses(
    seed: int, tmp_path: Path, parts: Callable[[int], tuple[Tensor, Tensor]], minimum: float
) -> None:
    some = Settings(
        partitions=PARTITIONS, devices=DEVICES, redundancy=2, patience_s=2 * PATIENCE_S, min_timeout_s=0.3
    )
    notes = Told()
    with around_a_switch(MACHINES) as (switch, machines):
        context = switch.inside(lambda: start_coordinator(Address(switch.address, 0), "run"))
        runtime, address = switch.inside(context.__enter__)
        crowd = Scattered(address, tmp_path, data=parts, machines=machines)

        def cut(pid: int, dead: bool) -> None:
            ip("-n", switch.name, "link", "set", crowd.machine(pid).cable, "down" if dead else "up")

        try:
            for place in range(DEVICES):
                crowd.join(place if place < PARTITIONS else None)
            coordinator = Coordinator(runtime, some, run="run", record=notes)  # type: ignore[arg-type]
            plan = Plan(seed, crowd, notes, coordinator.registry, cut)

            async def body() -> Iterate:
                await coordinator.gather()
                labels = torch.cat([one.labels for one in coordinator.activate_partitions()])
                found = await solve(
                    LBFGS(),
                    Problem(coordinator, Logistic(), labels[:, None]),
                    max_iterations=500,
                    callback=lambda state: plan.at(state.iterations),
                )
                plan.end()
                while plan.awaited and runtime.read_clock() < LIMIT_S:
                    await coordinator.multiply(torch.ones(coordinator.features, 1, dtype=torch.float64))
                await coordinator.end()
                return found

            found = runtime.drive(body())
            left = crowd.left()
            context.__exit__(None, None, None)
        finally:
            crowd.close()
    off = found.objective / minimum - 1
    print(
        f"plan {seed}: {'; '.join(plan.done)}: {off:.1e}, {found.iterations} iterates, {runtime.read_clock():.1f} s"
    )
    assert found.has_converged
    assert abs(off) < SAME
    assert plan.done
    assert runtime.read_clock() < LIMIT_S
    assert not coordinator.counters.num_refused, notes.of("refused")
    assert not [one for one in left if (one["reason"], one["refused"], one["kept"]) != ("", 0, [])]
