"""Replicas in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from farflung.config import Training
from farflung.loop import Replica
from farflung.recipes import parse_recipe
from farflung.runs import make_replica, resolve_run_collective
from farflung.sim import VirtualWorld
from farflung.telemetry import Event, Telemetry
from farflung.types import SampleIds, Workload

__all__ = ["replicas_in"]


def replicas_in(
    world: VirtualWorld,
    task: Workload,
    training: Training,
    parts: Mapping[str, object],
    sink: Callable[[Event], None] | None = None,
    shares: Sequence[SampleIds] | None = None,
) -> list[Replica]:
    """One for each of the world's runtimes.

    Args:
      world: where.
      task: what they train.
      training: how.
      parts: members of the recipe; the others are those of ``synchronous``.
      sink: takes the events of rank 0.
      shares: of the training set; ``None``: all draw from the whole.
    """
    chosen = parse_recipe("synchronous").with_components(**parts)
    replicas = [
        make_replica(
            runtime,
            task,
            chosen,
            training,
            Telemetry(rank, *([sink] if sink is not None and rank == 0 else [])),
            shares=shares,
        )
        for rank, runtime in enumerate(world.runtimes)
    ]
    resolve_run_collective(world.resolve_collective, chosen, replicas[0])
    return replicas
