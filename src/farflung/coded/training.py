"""Training on the coordinator: a solver's iterates, over whatever partitions there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.coded.coordinator import Coordinator, PartitionsChanged
from farflung.coded.objectives import Objective
from farflung.coded.problem import Problem
from farflung.coded.record import Record
from farflung.coded.solvers import Iterate, Solver

__all__ = ["Trained", "train"]


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """What came of it.

    Args:
      iterate: the solver's last.
      partitions: the names of those that it was trained on, in the order of their samples.
      interrupted: whether it was asked to stop before it was through.
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

    Where partitions come or are lost for good on the way, the objective is another one: the solver begins anew at the
    weights that it had.

    Args:
      coordinator: of the devices.
      objective: what is minimised.
      solver: how.
      targets: makes of labels what the objective takes.
      max_iterations: in all.
      record: where iterates are kept, and the last one is taken up.
      told: is told of each iterate.
      stop_asked: whether to stop after the one under way.

    Raises:
      RunLost: see :meth:`Coordinator.gather` and :meth:`Coordinator.times`.
    """
    await coordinator.gather()
    kept = None if record is None else record.state()
    state = None if kept is None else solver.restored(kept["solver"])
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
