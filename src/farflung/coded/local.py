"""A coded run in this process: coordinator and devices in virtual time, on data that are at hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine
from typing import Any

from torch import Tensor

from farflung.coded.blocks import Holding
from farflung.coded.coordinator import Coordinator
from farflung.coded.device import Device
from farflung.coded.objectives import Objective
from farflung.coded.settings import Settings
from farflung.coded.solvers import Iterate, Solver
from farflung.coded.training import Trained, train
from farflung.runtime import VirtualRuntime, VirtualWorld
from farflung.tasks import Pending

__all__ = ["fit_locally", "local_settings", "partitioned"]


def local_settings(devices: int, partitions: int | None, rows: int, *, code: str, seed: int) -> Settings:
    """Of a run in this process, where nothing vanishes: whole blocks are answered, and none is made up for.

    Args:
      devices: all of them.
      partitions: how many of them bring data; ``None``: three quarters, at least one.
      rows: of the data; there are no more partitions.
      code: as text.
      seed: of the code.

    Raises:
      ConfigError: a value out of its range; begins with its name.
    """
    most = max(1, devices - max(1, devices // 4)) if partitions is None else partitions
    return Settings(partitions=min(most, rows), devices=devices, code=code, seed=seed, redundancy=0, pieces=1)


def partitioned(rows: int, partitions: int) -> list[slice]:
    """Where each partition begins and ends, the first ones one row larger where they cannot be equal.

    >>> partitioned(5, 2)
    [slice(0, 3, None), slice(3, 5, None)]
    """
    each, more = divmod(rows, partitions)
    bounds = [part * each + min(part, more) for part in range(partitions + 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]


def fit_locally(
    features: Tensor,
    labels: Tensor,
    settings: Settings,
    objective: Objective,
    solver: Solver[Iterate],
    targets: Callable[[Tensor], Tensor],
    *,
    max_iterations: int,
) -> Trained:
    """Trains on samples that are at hand, by the protocol of devices that are apart.

    The first devices bring a partition each, consecutive rows. Messages and computations take no time.

    Args:
      features: (rows, features) float64.
      labels: (rows,) float64.
      settings: with no more partitions than rows.
      objective: what is minimised.
      solver: how.
      targets: makes of labels what the objective takes.
      max_iterations: in all.
    """
    parts = [(features[rows], labels[rows]) for rows in partitioned(len(features), settings.partitions)]
    world = VirtualWorld(1 + settings.devices, whole=False)
    found: list[Trained] = []

    async def coordinate(runtime: VirtualRuntime) -> None:
        coordinator = Coordinator(runtime, settings)
        found.append(await train(coordinator, objective, solver, targets, max_iterations=max_iterations))

    async def attend(runtime: VirtualRuntime) -> None:
        place = runtime.comm.rank - 1
        holding = Holding(str(place), *parts[place]) if place < len(parts) else Holding()
        await Device(runtime, holding).run()

    first, *others = world.runtimes
    bodies: list[Coroutine[Pending[Any], None, None]] = [coordinate(first), *map(attend, others)]
    world.run(bodies)
    return found[0]
