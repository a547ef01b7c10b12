"""The one place that makes a replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from farflung.config import Training
from farflung.recipes import Recipe
from farflung.replica import Checkpoints, Replica
from farflung.replica.placement import HOST
from farflung.telemetry import Telemetry
from farflung.types import Runtime, SampleIds, Workload

__all__ = ["make_replica"]


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
    rank = runtime.comm.rank
    return kind(
        runtime,
        task,
        training,
        recipe.parts(training.seed, None if shares is None else rank),
        telemetry or Telemetry(rank),
        checkpoints,
        stop_asked,
        None if shares is None else shares[rank],
        trace,
        device,
    )
