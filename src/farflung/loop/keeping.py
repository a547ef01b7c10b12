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
from farflung.files import reading
from farflung.loop.checkpoint import (
    Checkpoints,
    check_model,
    check_optimizer_kind,
    check_share,
    fingerprint,
    share_name,
)
from farflung.loop.drawing import Drawing
from farflung.loop.optimizers import load_optimizer_state, optimizer_state
from farflung.loop.summary import TimeSplit
from farflung.seeding import RandomState
from farflung.tasks import Pending, done
from farflung.telemetry import Telemetry
from farflung.types import Json, Runtime, SampleIds, State

__all__ = ["BackgroundTasks", "Keeping"]


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
    _under_way: list[Pending[Any]] = field(init=False, default_factory=list)

    async def run(
        self,
        errand: Callable[[Runtime], Coroutine[Pending[Any], None, T]],
        tell: Callable[..., None],
    ) -> Pending[T]:
        """Starts a task; in an untimed runtime, training may continue during it.

        Args:
          coroutine_fn: Coroutine function of the runtime, which leaves the replica unchanged.
          report: Called with the result, the time of its end (``t``) and its duration (``duration_s``).
        """
        off_clock, begin = self.runtime.off_clock, self.runtime.now()
        if off_clock is None:
            with self.engine.times.exclude():
                result = await errand(self.runtime)
            end = self.runtime.now()
            self.time_s.evaluation += end - begin
            tell(result, t=end, duration_s=end - begin)
            return done(result)

        async def run_task() -> T:
            result = await errand(off_clock)
            tell(result, t=begin, duration_s=0.0)
            return result

        for pending in self._under_way:
            if pending.error is not None:
                raise pending.error
        task = off_clock.launch(run_task())
        self._under_way = [*(pending for pending in self._under_way if not pending.done), task]
        return task

    async def end(self) -> None:
        """Waits for all pending tasks."""
        for task in self._under_way:
            await task


@dataclass(frozen=True, slots=True)
class Keeping:
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
    drawing: Drawing
    engine: Engine
    extensions: Sequence[Extension]
    share: SampleIds | None

    async def save(
        self,
        checkpoints: Checkpoints,
        step: int,
        exchanges: State,
        counted: State,
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
        shared_state, replica_state = self.state(step, exchanges, counted)

        async def write(runtime: Runtime) -> Path:
            folder = checkpoints.save(step, shared_state, replica_state)
            await barrier(runtime, step, Purpose.CHECKPOINT)
            checkpoints.prune()
            return folder

        def report_checkpoint(folder: Path, **times: Json) -> None:
            telemetry.emit("checkpoint", **times, step=step, path=f"{folder.parent.name}/{folder.name}")

        await background.run(write, report_checkpoint)

    def state(self, step: int, exchanges: State, counted: State) -> tuple[State, State]:
        """Returns the state that all replicas share, and the state of this replica."""
        model_state, live_buffers = self.model.state_dict(), dict(self.model.named_buffers())
        buffers = {name: t for name, t in model_state.items() if name in live_buffers}
        parameters = {name: t for name, t in model_state.items() if name not in live_buffers}
        has_diverged, drawing = self.engine.diverged, self.drawing
        shared_state: State = {
            "step": step,
            "fingerprint": fingerprint(self.model),
            "workload": self.workload,
            "training": self.training.to_json(),
            "model": {**parameters, **((self.engine.anchor_parameters() if has_diverged else None) or {})},
            "exchanges": exchanges["shared"],
        }
        replica_state: State = {
            "buffers": buffers,
            "parameters": parameters if has_diverged else {},
            "optimizer": optimizer_state(self.optimizer),
            "random": self.random.state_dict(),
            "sampler": drawing.parts.sampler.state_dict(),
            "stream": drawing.parts.stream.state_dict(),
            "drawn": drawing.state_dict(),
            "exchanges": exchanges["own"],
            "shared_nbytes": drawing.sent_nbytes,
            "extensions": {ext.key: ext.state_dict() for ext in self.extensions if ext.key},
            "share": share_name(self.share),
            **counted,
        }
        return shared_state, replica_state

    def resume(self, checkpoints: Checkpoints, step: int, take: Callable[[State], None]) -> None:
        """Continues from the checkpoint of ``step``.

        Args:
          checkpoints: Checkpoint files.
          step: Number of completed steps.
          restore_counts: Receives the saved counts, and the number of completed steps as ``step``.

        Raises:
          CheckpointError: The checkpoint is damaged, or belongs to another model or share of the data.
        """
        self.take_over(*checkpoints.load(step), f"{checkpoints.folder}, step {step}", take)

    def take_over(self, shared: State, own: State, where: str, take: Callable[[State], None]) -> None:
        """Restores the shared state and the state of this replica; see :meth:`resume`."""
        check_model(shared, self.model, where)
        check_share(own, self.share, where)
        check_optimizer_kind(own, self.optimizer, where)
        with reading(where, "not of this recipe; resume with the one it was made with", CheckpointError):
            self._load(shared, own)
            take({**own, "step": shared["step"]})

    def _load(self, shared: State, own: State) -> None:
        drawing = self.drawing
        self.model.load_state_dict({**shared["model"], **own["buffers"], **own["parameters"]})
        load_optimizer_state(self.optimizer, own["optimizer"])
        if "random" in own:
            self.random.load_state_dict(own["random"])
        drawing.parts.sampler.load_state_dict(own["sampler"])
        drawing.parts.stream.seek(own["stream"])
        drawing.load_state_dict(own["drawn"], own["shared_nbytes"])
        exchanges = {"shared": shared["exchanges"], "own": own["exchanges"]}
        self.engine.load_state_dict(exchanges)
        extension_states = own["extensions"]
        keys = {extension.key for extension in self.extensions}
        if missing := {name for name, state in extension_states.items() if state} - keys:
            raise ValueError(f"it has the state of {', '.join(sorted(missing))}")
        for extension in self.extensions:
            if extension.key:
                extension.load_state_dict(extension_states.get(extension.key, {}))
