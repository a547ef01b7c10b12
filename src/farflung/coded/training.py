"""Training on the coordinator: a solver's iterates over the partitions that there are; and all of it in one process."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farflung.coded.blocks import Holding
from farflung.coded.coordinator import Coordinator, PartitionsChanged
from farflung.coded.device import Device
from farflung.coded.objectives import Objective
from farflung.coded.parts import partitioned
from farflung.coded.problem import Problem
from farflung.coded.record import Record
from farflung.coded.settings import Settings
from farflung.coded.solvers import Iterate, Solver
from farflung.errors import CheckpointError
from farflung.sim import VirtualRuntime, VirtualWorld
from farflung.tasks import Pending
from farflung.types import State

__all__ = ["Trained", "fit_locally", "local_settings", "train"]


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """The outcome of training.

    Args:
      iterate: the solver's last.
      partitions: names of those that were trained on, in the order of their samples.
      interrupted: whether training was asked to stop before it was through.
    """

    iterate: Iterate
    partitions: tuple[str, ...]
    interrupted: bool


async def train(
    coordinator: Coordinator,
    objective: Objective,
    solver: Solver[Iterate],
    targets: Callable[[Tensor], Tensor],
    *,
    max_iterations: int,
    record: Record | None = None,
    told: Callable[[Iterate], object] = lambda iterate: None,
    stop_asked: Callable[[], bool] = lambda: False,
) -> Trained:
    """Gathers the devices and trains until the solver has converged, or may take no further step.

    Where partitions come or are lost for good on the way, the objective is another one: the solver starts again at the
    weights that it had.

    Args:
      coordinator: of the devices.
      objective: to be minimised.
      solver: minimises it.
      targets: makes the targets of the objective from labels.
      max_iterations: in all.
      record: keeps iterates; training goes on from the last one there.
      told: called with each iterate.
      stop_asked: whether to stop after the iterate under way.

    Raises:
      CheckpointError: the record has the state of another solver.
      RunLost: see :meth:`Coordinator.gather` and :meth:`Coordinator.times`.
    """
    await coordinator.gather()
    kept = None if record is None else record.state()
    state = None if kept is None else _restored(solver, kept["solver"])
    before = None if kept is None else tuple(kept["partitions"])
    spent = 0 if kept is None else int(kept["spent"])
    while True:
        active = coordinator.settle()
        names = tuple(partition.name for partition in active)
        labels = torch.cat([partition.labels for partition in active])
        problem = Problem(coordinator, objective, targets(labels))
        try:
            if state is None or names != before:
                spent += 0 if state is None else state.iterations
                state = await solver.init(problem, None if state is None else state.weights)
                before = names
            while not (state.converged or spent + state.iterations >= max_iterations or stop_asked()):
                state = await solver.step(problem, state)
                coordinator.members.tell(
                    "iterate", iterations=state.iterations, objective=state.objective, gap=state.gap
                )
                told(state)
                if record is not None:
                    record.keep_state({"solver": state.tree(), "partitions": list(names), "spent": spent})
                if coordinator.changed:
                    break
        except PartitionsChanged:
            continue
        if not coordinator.changed:
            await coordinator.end()
            return Trained(state, names, stop_asked() and not state.converged)


def _restored(solver: Solver[Iterate], tree: State) -> Iterate:
    try:
        return solver.restored(tree)
    except KeyError as error:
        raise CheckpointError(f"the run has the state of another solver: {error} is missing in it") from None


def local_settings(devices: int, partitions: int | None, rows: int, *, code: str, seed: int) -> Settings:
    """Makes settings for :func:`fit_locally`: whole blocks are answered, and no device is expected to vanish.

    Args:
      devices: all of them.
      partitions: devices that bring data; ``None``: three quarters, at least one.
      rows: of the data; there are no more partitions.
      code: as text.
      seed: of the code.

    Raises:
      ConfigError: a value out of its range; begins with its name.
    """
    most = max(1, devices - max(1, devices // 4)) if partitions is None else partitions
    return Settings(partitions=min(most, rows), devices=devices, code=code, seed=seed, redundancy=0, pieces=1)


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
    """Trains on samples in memory, by the protocol of devices, in virtual time.

    The first devices bring a partition each, consecutive rows. Messages and computations take no time.

    Args:
      features: (rows, features) float64.
      labels: (rows,) float64.
      settings: with no more partitions than rows.
      objective: to be minimised.
      solver: minimises it.
      targets: makes the targets of the objective from labels.
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
