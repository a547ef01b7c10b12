"""Background tasks of a replica, such as evaluations, and its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from farflung.comm import Purpose
from farflung.config import Training
from farflung.engine.averaging import barrier
from farflung.engine.engine import Engine
from farflung.engine.extension import Extension
from farflung.errors import CheckpointError
from farflung.files import wrap_read_errors
from farflung.loop.batch_loader import BatchLoader
from farflung.loop.checkpoint import (
    Checkpoints,
    check_model,
    check_optimizer_kind,
    check_share,
    compute_fingerprint,
    hash_share,
)
from farflung.loop.optimizers import get_optimizer_state, load_optimizer_state
from farflung.loop.summary import TimeSplit
from farflung.seeding import RandomState
from farflung.tasks import Pending, create_completed
from farflung.telemetry import Telemetry
from farflung.trees import has_tensors
from farflung.types import Json, Runtime, SampleIds, State

__all__ = ["BackgroundTasks", "Checkpointer"]


T = TypeVar("T")


@dataclass(slots=True)
class BackgroundTasks:
    """Tasks of an untimed runtime during training; without one, they take time of their own.

    Args:
      runtime: Clock and messages of the replica.
      engine: Engine of the replica.
      time_s: Time split that the duration is added to.
    """

    runtime: Runtime
    engine: Engine
    time_s: TimeSplit
    _pending_tasks: list[Pending[Any]] = field(init=False, default_factory=list)

    async def run(
        self,
        coroutine_fn: Callable[[Runtime], Coroutine[Pending[Any], None, T]],
        report: Callable[..., None],
    ) -> Pending[T]:
        """Starts a task; in an untimed runtime, training may continue during it.

        Args:
          coroutine_fn: Coroutine function of the runtime, which leaves the replica unchanged.
          report: Called with the result, the time of its end (``t``) and its duration (``duration_s``).
        """
        off_clock, begin = self.runtime.untimed, self.runtime.read_clock()
        if off_clock is None:
            with self.engine.times.exclude():
                result = await coroutine_fn(self.runtime)
            end = self.runtime.read_clock()
            self.time_s.evaluation += end - begin
            report(result, t=end, duration_s=end - begin)
            return create_completed(result)

        async def run_task() -> T:
            result = await coroutine_fn(off_clock)
            report(result, t=begin, duration_s=0.0)
            return result

        for pending in self._pending_tasks:
            if pending.error is not None:
                raise pending.error
        task = off_clock.launch(run_task())
        self._pending_tasks = [*(pending for pending in self._pending_tasks if not pending.is_done), task]
        return task

    async def wait(self) -> None:
        """Waits for all pending tasks."""
        for task in self._pending_tasks:
            await task


@dataclass(frozen=True, slots=True)
class Checkpointer:
    """Writer and loader of a replica's checkpoints.

    Args:
      workload: Name of the workload.
      training: Settings of the run.
      model: Model of the replica.
      optimizer: Optimizer of the model.
      random: Random state of training.
      batch_loader: Loader of the samples; its stream and sampler are saved too.
      engine: Engine with the exchanges in flight.
      extensions: Extensions of the run.
      share: Samples that this replica alone draws from; ``None``: there are none.
    """

    workload: str
    training: Training
    model: nn.Module
    optimizer: torch.optim.Optimizer
    random: RandomState
    batch_loader: BatchLoader
    engine: Engine
    extensions: Sequence[Extension]
    share: SampleIds | None

    async def save(
        self,
        checkpoints: Checkpoints,
        step: int,
        exchanges: State,
        counts: State,
        background: BackgroundTasks,
        telemetry: Telemetry,
    ) -> None:
        """Saves a checkpoint of the replica; complete when every replica has written its part.

        Args:
          checkpoints: Checkpoint files.
          step: Number of completed steps.
          exchanges: Result of :meth:`farflung.engine.Engine.state_dict`.
          counts: Other counts of the replica, by name.
          background: Tasks that the writing is added to.
          telemetry: Receiver of the event.
        """
        shared_state, replica_state = self.build_states(step, exchanges, counts)

        async def write(runtime: Runtime) -> Path:
            folder = checkpoints.save(step, shared_state, replica_state)
            await barrier(runtime, step, Purpose.CHECKPOINT)
            checkpoints.prune()
            return folder

        def report_checkpoint(folder: Path, **times: Json) -> None:
            telemetry.emit("checkpoint", **times, step=step, path=f"{folder.parent.name}/{folder.name}")

        await background.run(write, report_checkpoint)

    def build_states(self, step: int, exchanges: State, counts: State) -> tuple[State, State]:
        """Returns the state that all replicas share, and the state of this replica."""
        model_state, live_buffers = self.model.state_dict(), dict(self.model.named_buffers())
        buffers = {name: t for name, t in model_state.items() if name in live_buffers}
        parameters = {name: t for name, t in model_state.items() if name not in live_buffers}
        has_diverged, drawing = self.engine.has_diverged, self.batch_loader
        shared_state: State = {
            "step": step,
            "fingerprint": compute_fingerprint(self.model),
            "workload": self.workload,
            "recipe": dict(drawing.components.settings),
            "training": self.training.to_json(),
            "model": {
                **parameters,
                **((self.engine.get_anchor_parameters() if has_diverged else None) or {}),
            },
            "exchanges": exchanges["shared"],
        }
        replica_state: State = {
            "buffers": buffers,
            "parameters": parameters if has_diverged else {},
            "optimizer": get_optimizer_state(self.optimizer),
            "random": self.random.state_dict(),
            "sampler": drawing.components.sampler.state_dict(),
            "stream": drawing.components.stream.state_dict(),
            "picked_samples": drawing.state_dict(),
            "exchanges": exchanges["local"],
            "shared_nbytes": drawing.sent_nbytes,
            "extensions": {ext.key: ext.state_dict() for ext in self.extensions if ext.key},
            "share": hash_share(self.share),
            **counts,
        }
        return shared_state, replica_state

    def restore_states(
        self, shared_state: State, replica_state: State, origin: str, restore_counts: Callable[[State], None]
    ) -> None:
        """Restores the shared state and the state of this replica.

        Args:
          shared_state: State that all replicas share.
          replica_state: State of this replica.
          origin: Origin of the states, for errors.
          restore_counts: Receives the saved counts, and the number of completed steps as ``step``.

        Raises:
          CheckpointError: They are damaged, or belong to another model or share of the data.
        """
        check_model(shared_state, self.model, origin)
        check_share(replica_state, self.share, origin)
        check_optimizer_kind(replica_state, self.optimizer, origin)
        with wrap_read_errors(
            origin, "not of this recipe; resume with the one it was made with", CheckpointError
        ):
            self._load_model(shared_state, replica_state)
            self.batch_loader.components.sampler.load_state_dict(replica_state["sampler"])
            self.engine.load_state_dict(
                {"shared": shared_state["exchanges"], "local": replica_state["exchanges"]}
            )
            self._load_extensions(replica_state["extensions"])
            restore_counts({**replica_state, "step": shared_state["step"]})

    def take_over(
        self, shared_state: State, replica_state: State, restore_counts: Callable[[State], None]
    ) -> list[Json]:
        """Restores the states of a replica with another recipe, after its flush; returns the names of dropped states.

        States of reducer and schedule are dropped, and those of the sampler if it is another.
        """
        old, new = shared_state["recipe"], self.batch_loader.components.settings
        shared, local = shared_state["exchanges"], replica_state["exchanges"]
        states: dict[str, object] = {
            "codec" if old["codec"] != "identity" else "reducer": (shared["reducer"], local["reducer"]),
            "schedule": (
                shared["schedule"],
                [
                    {**state, "anchor": None}
                    for merge in shared["merges"].values()
                    for state in merge.values()
                ],
                local["merges"],
            ),
        }
        self._load_model(shared_state, replica_state)
        self.engine.load_state_dict({"shared": shared, "local": local}, counts_only=True)
        if old["sampler"] == new["sampler"]:
            self.batch_loader.components.sampler.load_state_dict(replica_state["sampler"])
            self._load_extensions(replica_state["extensions"])
        else:
            states["sampler"] = replica_state["sampler"]
        restore_counts({**replica_state, "step": shared_state["step"]})
        return [f"{family} {old[family]}" for family, state in states.items() if has_tensors(state)]

    def _load_model(self, shared_state: State, replica_state: State) -> None:
        """Loads the model, the optimizer's state, the random state, and the position in the data."""
        drawing = self.batch_loader
        self.model.load_state_dict(
            {**shared_state["model"], **replica_state["buffers"], **replica_state["parameters"]}
        )
        load_optimizer_state(self.optimizer, replica_state["optimizer"])
        if "random" in replica_state:
            self.random.load_state_dict(replica_state["random"])
        drawing.components.stream.load_state_dict(replica_state["stream"])
        drawing.load_state_dict(replica_state["picked_samples"], replica_state["shared_nbytes"])

    def _load_extensions(self, extension_states: State) -> None:
        keys = {extension.key for extension in self.extensions}
        if missing := {name for name, state in extension_states.items() if state} - keys:
            raise ValueError(f"it has the state of {', '.join(sorted(missing))}")
        for extension in self.extensions:
            if extension.key:
                extension.load_state_dict(extension_states.get(extension.key, {}))
