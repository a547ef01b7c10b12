"""Background tasks of a replica, evaluations and checkpoints, and what a checkpoint holds of it."""

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
    """A part of a replica's time of their own, or off the clock, beside what follows.

    Args:
      runtime: the world.
      engine: of the replica.
      time_s: takes the time.
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
        """One of them, begun: where it is off the clock, training may go on.

        Args:
          errand: in which runtime; leaves the replica as it is. Off the clock it begins at once.
          tell: of its result, and of when it was through and how long it took (``t``, ``duration_s``).
        """
        off_clock, begin = self.runtime.off_clock, self.runtime.now()
        if off_clock is None:
            with self.engine.times.exclude():
                result = await errand(self.runtime)
            end = self.runtime.now()
            self.time_s.evaluation += end - begin
            tell(result, t=end, duration_s=end - begin)
            return done(result)

        async def told() -> T:
            result = await errand(off_clock)
            tell(result, t=begin, duration_s=0.0)
            return result

        for each in self._under_way:
            if each.error is not None:
                raise each.error
        task = off_clock.launch(told())
        self._under_way = [*(each for each in self._under_way if not each.done), task]
        return task

    async def end(self) -> None:
        """Waits for those that are under way."""
        for each in self._under_way:
            await each


@dataclass(frozen=True, slots=True)
class Keeping:
    """Writes a replica's checkpoints, and continues from them.

    Args:
      workload: its name.
      training: the settings.
      model: the replica's.
      optimizer: of the model.
      random: what models draw from in training.
      drawing: the samples; its stream and sampler are kept too.
      engine: with what is in flight.
      extensions: of the run.
      share: the samples that the replica draws from alone; ``None``: there are none.
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
        """A checkpoint of the whole replica; whole when every replica has written its part.

        Args:
          checkpoints: the files.
          step: after so many.
          exchanges: what :meth:`farflung.engine.Engine.state_dict` gave.
          counted: what else the replica has counted, by name.
          background: by which it is written.
          telemetry: is told.
        """
        shared, own = self.state(step, exchanges, counted)

        async def write(runtime: Runtime) -> Path:
            folder = checkpoints.save(step, shared, own)
            await barrier(runtime, step, Purpose.CHECKPOINT)
            checkpoints.prune()
            return folder

        def tell(folder: Path, **when: Json) -> None:
            telemetry.emit("checkpoint", **when, step=step, path=f"{folder.parent.name}/{folder.name}")

        await background.run(write, tell)

    def state(self, step: int, exchanges: State, counted: State) -> tuple[State, State]:
        """What all replicas have alike, and what is this one's own."""
        kept, running = self.model.state_dict(), dict(self.model.named_buffers())
        buffers = {name: t for name, t in kept.items() if name in running}
        parameters = {name: t for name, t in kept.items() if name not in running}
        diverged, drawing = self.engine.diverged, self.drawing
        shared: State = {
            "step": step,
            "fingerprint": fingerprint(self.model),
            "workload": self.workload,
            "training": self.training.to_json(),
            "model": {**parameters, **((self.engine.anchor_parameters() if diverged else None) or {})},
            "exchanges": exchanges["shared"],
        }
        own: State = {
            "buffers": buffers,
            "parameters": parameters if diverged else {},
            "optimizer": optimizer_state(self.optimizer),
            "random": self.random.state_dict(),
            "sampler": drawing.parts.sampler.state_dict(),
            "stream": drawing.parts.stream.state_dict(),
            "drawn": drawing.state_dict(),
            "exchanges": exchanges["own"],
            "shared_nbytes": drawing.sent_nbytes,
            "extensions": {each.key: each.state_dict() for each in self.extensions if each.key},
            "share": share_name(self.share),
            **counted,
        }
        return shared, own

    def resume(self, checkpoints: Checkpoints, step: int, take: Callable[[State], None]) -> None:
        """Continues from the checkpoint of ``step``.

        Args:
          checkpoints: the files.
          step: after so many.
          take: gets what the replica had counted then, and how many steps it had done as ``step``.

        Raises:
          CheckpointError: damaged, or of another model or share of the data.
        """
        self.take_over(*checkpoints.load(step), f"{checkpoints.folder}, step {step}", take)

    def take_over(self, shared: State, own: State, where: str, take: Callable[[State], None]) -> None:
        """Continues from what all replicas had alike and what is this one's own; see :meth:`resume`."""
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
        saved = own["extensions"]
        keys = {extension.key for extension in self.extensions}
        if missing := {name for name, state in saved.items() if state} - keys:
            raise ValueError(f"it has the state of {', '.join(sorted(missing))}")
        for extension in self.extensions:
            if extension.key:
                extension.load_state_dict(saved.get(extension.key, {}))
