"""Creation of replicas, and resolution of a run's collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from farflung.config import Training
from farflung.engine.placement import HOST
from farflung.loop import Checkpoints, Replica, wrap_version_errors
from farflung.recipes import Recipe
from farflung.reducers import list_summed_nbytes
from farflung.telemetry import Telemetry
from farflung.types import Json, Runtime, SampleIds, State, Workload

__all__ = ["find_recipe_changes", "make_replica", "resolve_run_collective", "resume_replica"]


def make_replica(
    runtime: Runtime,
    workload: Workload,
    recipe: Recipe,
    training: Training,
    telemetry: Telemetry | None = None,
    *,
    shares: Sequence[SampleIds] | None = None,
    checkpoints: Checkpoints | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    trace: bool = False,
    device: torch.device = HOST,
    replica_type: Callable[..., Replica] = Replica,
) -> Replica:
    """Creates a replica of a run, on the wall clock or in virtual time.

    Args:
      runtime: Runtime of the replica.
      workload: Workload to train.
      recipe: Recipe of the run, from which this replica's components are built.
      training: Training settings.
      telemetry: Emitter of events; by default events are discarded.
      shares: Training samples of each replica; ``None`` if all draw from all samples.
      checkpoints: Checkpoints of the replica, if any.
      should_stop: Function that returns True after a stop request; all replicas then stop after the same step.
      trace: True to emit an event of every exchange.
      device: Device of model, gradients and optimizer.
      replica_type: Class of the replica.

    Raises:
      BadInput: Parts or settings are incompatible.
    """
    rank, rates = runtime.comm.rank, training.make_rate_schedule()
    parts = recipe.build_components(training.seed, None if shares is None else rank)
    warmup = getattr(rates, "warmup", 0) if rates.unit == "steps" else 0
    return replica_type(
        runtime,
        workload,
        training,
        replace(parts, reducer=parts.reducer.with_run_length(training.steps, warmup)),
        telemetry or Telemetry(rank),
        checkpoints,
        should_stop,
        None if shares is None else shares[rank],
        trace,
        device,
    )


def resolve_run_collective(
    resolve: Callable[..., str], recipe: Recipe, replica: Replica, step: int = 0
) -> str:
    """Resolves the recipe's collective for a run.

    Call this after replicas are created, and before they start or resume, since resuming restarts exchanges in flight.

    Args:
      resolve: ``resolve_collective`` of the virtual world or of this replica's runtime.
      recipe: Recipe of the run.
      replica: Any replica of the run.
      step: First step of the run.

    Returns:
      Name of the collective, or names for all tensor sizes.
    """
    reducer = recipe.build_components(replica.training.seed).reducer
    nbytes = list_summed_nbytes(reducer, replica.bucket_specs, replica.runtime.comm.size)
    return resolve(recipe.collective, nbytes, step=step)


def resume_replica(
    replica: Replica, step: int, recipe: Recipe, make: Callable[..., Replica]
) -> Replica | None:
    """Resumes a replica from the checkpoint of ``step``.

    Args:
      replica: Replica of the run, before its first step.
      step: Number of completed steps.
      recipe: Recipe of the run.
      make: Creates a replica of the same rank with keyword ``recipe``.

    Returns:
      Resumed replica with the recipe of the checkpoint if that is another, for :meth:`farflung.loop.Replica.take_over`.

    Raises:
      CheckpointError: The checkpoint is damaged, or belongs to another model or share of the data.
    """
    assert replica.checkpoints is not None
    states = replica.checkpoints.load(step)
    changes = find_recipe_changes(states[0], recipe, f"{replica.checkpoints.folder}, step {step}")
    resumed = make(recipe=recipe.with_components(**changes)) if changes else replica
    resumed.resume(step, states)
    return resumed if changes else None


def find_recipe_changes(shared_state: State, recipe: Recipe, origin: str) -> dict[str, Json]:
    """Finds the components in a checkpoint's shared tree that differ from a recipe and have a state in training.

    Raises:
      CheckpointError: The tree lacks a component.
    """
    with wrap_version_errors(origin):
        stored = shared_state["recipe"]
        return {
            name: stored[name]
            for name, value in recipe.settings.items()
            if name not in ("collective", "scaling") and stored[name] != value
        }
