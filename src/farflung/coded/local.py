"""A coded run in this process: coordinator and devices in virtual time, on data that are at hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine, Sequence
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

__all__ = ["fit_locally", "partitioned"]


def partitioned(rows: int, partitions: int) -> list[slice]:
    """Where each partition begins and ends, the first ones one row larger where they cannot be equal.

    >>> partitioned(5, 2)
    [slice(0, 3, None), slice(3, 5, None)]
    """
    each, more = divmod(rows, partitions)
    bounds = [part * each + min(part, more) for part in range(partitions + 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]


def fit_locally(
    parts: Sequence[tuple[Tensor, Tensor]],
    settings: Settings,
    objective: Objective,
    solver: Solver[Iterate],
    targets: Callable[[Tensor], Tensor],
    *,
    max_iterations: int,
) -> Trained:
    """Trains on partitions that are at hand, by the protocol of devices that are apart.

    Messages and computations take no time.

    Args:
      parts: (rows, features) features and (rows,) labels of each partition, float64.
      settings: as many partitions as there are parts.
      objective: what is minimised.
      solver: how.
      targets: makes of labels what the objective takes.
      max_iterations: in all.
    """
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
