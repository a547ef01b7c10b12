"""What a checkpoint holds of a replica, written and read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from farflung.comm import Purpose
from farflung.config import Training
from farflung.errors import CheckpointError
from farflung.files import reading
from farflung.replica.averaging import barrier
from farflung.replica.checkpoint import (
    Checkpoints,
    check_model,
    check_optimizer_kind,
    check_share,
    fingerprint,
    share_name,
)
from farflung.replica.drawing import Drawing
from farflung.replica.errands import Errands
from farflung.replica.exchanges import Exchanges
from farflung.replica.optimizers import load_optimizer_state, optimizer_state
from farflung.seeding import RandomState
from farflung.telemetry import Telemetry
from farflung.types import Json, Runtime, SampleIds, State

__all__ = ["Keeping"]


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
      exchanges: with what is under way.
      share: the samples that the replica draws from alone; ``None``: there are none.
    """

    workload: str
    training: Training
    model: nn.Module
    optimizer: torch.optim.Optimizer
    random: RandomState
    drawing: Drawing
    exchanges: Exchanges
    share: SampleIds | None

    async def save(
        self,
        checkpoints: Checkpoints,
        step: int,
        exchanges: State,
        counted: State,
        errands: Errands,
        telemetry: Telemetry,
    ) -> None:
        """A checkpoint of the whole replica; whole when every replica has written its part.

        Args:
          checkpoints: the files.
          step: after so many.
          exchanges: what :meth:`farflung.replica.Exchanges.snapshot` gave.
          counted: what else the replica has counted, by name.
          errands: by which it is written.
          telemetry: is told.
        """
        shared, own = self._state(step, exchanges, counted)

        async def write(runtime: Runtime) -> Path:
            folder = checkpoints.save(step, shared, own)
            await barrier(runtime, step, Purpose.CHECKPOINT)
            checkpoints.prune()
            return folder

        def tell(folder: Path, **when: Json) -> None:
            telemetry.emit("checkpoint", **when, step=step, path=f"{folder.parent.name}/{folder.name}")

        await errands.run(write, tell)

    def _state(self, step: int, exchanges: State, counted: State) -> tuple[State, State]:
        """What all replicas have alike, and what is this one's own."""
        kept, running = self.model.state_dict(), dict(self.model.named_buffers())
        buffers = {name: t for name, t in kept.items() if name in running}
        parameters = {name: t for name, t in kept.items() if name not in running}
        apart, drawing = self.exchanges.apart, self.drawing
        shared: State = {
            "step": step,
            "fingerprint": fingerprint(self.model),
            "workload": self.workload,
            "training": self.training.to_json(),
            "model": {**parameters, **((self.exchanges.common() if apart else None) or {})},
            "exchanges": exchanges["shared"],
        }
        own: State = {
            "buffers": buffers,
            "parameters": parameters if apart else {},
            "optimizer": optimizer_state(self.optimizer),
            "random": self.random.state_dict(),
            "sampler": drawing.parts.sampler.state_dict(),
            "stream": drawing.parts.stream.state_dict(),
            "drawn": drawing.state_dict(),
            "exchanges": exchanges["own"],
            "shared_nbytes": drawing.sent_nbytes,
            "ownership": drawing.ownership.state_dict(),
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
        shared, own = checkpoints.load(step)
        where = f"{checkpoints.folder}, step {step}"
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
        self.random.load_state_dict(own["random"])
        drawing.parts.sampler.load_state_dict(own["sampler"])
        drawing.parts.stream.seek(own["stream"])
        drawing.load_state_dict(own["drawn"], own["shared_nbytes"])
        exchanges = {"shared": shared["exchanges"], "own": own["exchanges"]}
        self.exchanges.load_state_dict(exchanges)
        drawing.ownership.load_state_dict(own.get("ownership", {}))
