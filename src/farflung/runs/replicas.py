"""The one place that makes a replica, and that settles how the replicas of a run sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from farflung.config import Training
from farflung.engine.placement import HOST
from farflung.loop import Checkpoints, Replica
from farflung.recipes import Recipe
from farflung.reducers import summed_nbytes
from farflung.telemetry import Telemetry
from farflung.types import Runtime, SampleIds, Workload

__all__ = ["make_replica", "settled_collective"]


def make_replica(
    runtime: Runtime,
    task: Workload,
    recipe: Recipe,
    training: Training,
    telemetry: Telemetry | None = None,
    *,
    shares: Sequence[SampleIds] | None = None,
    checkpoints: Checkpoints | None = None,
    stop_asked: Callable[[], bool] = lambda: False,
    trace: bool = False,
    device: torch.device = HOST,
    kind: Callable[..., Replica] = Replica,
) -> Replica:
    """One member of a run, in whatever world.

    Args:
      runtime: the world.
      task: what is trained.
      recipe: how to train together; this replica gets members of its own.
      training: for how long and with what settings.
      telemetry: where events go; nowhere when not given.
      shares: the training samples of each replica; ``None``: all draw from the whole set.
      checkpoints: where state is kept, if it is.
      stop_asked: whether this replica was asked to stop; then all stop after the same step.
      trace: whether to tell of every exchange.
      device: where model, gradients and optimizer are.
      kind: what to make.

    Raises:
      BadInput: parts or settings that do not go together.
    """
    rank, rates = runtime.comm.rank, training.make_rates()
    parts = recipe.parts(training.seed, None if shares is None else rank)
    warmup = getattr(rates, "warmup", 0) if rates.by == "steps" else 0
    return kind(
        runtime,
        task,
        training,
        replace(parts, reducer=parts.reducer.for_run(training.steps, warmup)),
        telemetry or Telemetry(rank),
        checkpoints,
        stop_asked,
        None if shares is None else shares[rank],
        trace,
        device,
    )


def settled_collective(settle: Callable[..., str], recipe: Recipe, replica: Replica, step: int = 0) -> str:
    """What the recipe's collective stands for in a run, once its replicas are there.

    Before they start, and before they resume: what was under way then starts again at once.

    Args:
      settle: ``settle_collective`` of the virtual world, or of this replica's runtime, with what it takes beside.
      recipe: the run's.
      replica: any of the run's.
      step: the first of the run.

    Returns:
      The name of the collective, or those of all sizes of tensor.
    """
    reducer = recipe.parts(replica.training.seed).reducer
    nbytes = summed_nbytes(reducer, replica.bucket_specs, replica.runtime.comm.size)
    return settle(recipe.collective, nbytes, step=step)
