"""Hugging Face Transformers: a callback by which the ``Trainer``'s gradients travel compressed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from farflung.ddp import HookState, ddp_hook
from farflung.errors import Unsupported
from farflung.extras import need
from farflung.integrations.own_files import begin_run, restore_own, save_own
from farflung.types import Codec, Reducer

need("farflung.integrations.transformers", "transformers", extra="transformers")

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

__all__ = ["FarflungCallback"]

KEY = "farflung"
"""What the state that the trainer writes into its checkpoints calls the run by."""


class FarflungCallback(TrainerCallback):
    """Registers :func:`farflung.ddp_hook` with the ``DistributedDataParallel`` that the trainer wraps its model in.

    >>> trainer.add_callback(FarflungCallback(trainer, "error_feedback(topk(0.01))"))  # doctest: +SKIP

    With a single process there is no wrapper, and nothing to do. Each rank keeps what its codec remembers in the
    trainer's checkpoints, as ``farflung-<rank>-of-<size>.safetensors``, and a training that is resumed from one goes on
    from there, wherever it lies.

    Args:
      trainer: whose ``model_wrapped`` is looked at when training begins; its ``train`` tells the callback which
        checkpoint is loaded.
      how: a codec or reducer, or its name with options.
      options: further ones of :func:`farflung.ddp_hook`.

    Raises:
      MissingExtra: on import, without the extra ``transformers``.
    """

    def __init__(self, trainer: Trainer, how: Codec | Reducer | str, **options: Any) -> None:
        self._trainer, self._how, self._options = trainer, how, options
        self._resumed_from: str | bool | None = None
        self._run = ""
        self._train = trainer.train
        trainer.train = self._note_and_train  # type: ignore[method-assign]  # no event names the checkpoint
        self._hooked: DistributedDataParallel | None = None
        self.state: HookState | None = None
        """What the codec remembers, once training has begun."""

    def _note_and_train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        self._resumed_from = resume_from_checkpoint
        return self._train(resume_from_checkpoint, *args, **kwargs)

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Registers the hook, goes on from a checkpoint's memory, and names the run in the trainer's own state.

        Raises:
          Unsupported: the trainer wraps its model in something else.
          CheckpointError: a rank's file of the checkpoint is damaged, or absent while others have theirs.
        """
        del control, kwargs
        wrapped = self._trainer.model_wrapped
        if isinstance(wrapped, DistributedDataParallel):
            if self.state is None or wrapped is not self._hooked:
                self.state, hook = ddp_hook(self._how, **self._options)
                wrapped.register_comm_hook(self.state, hook)
                self._hooked = wrapped
            device = next(wrapped.parameters()).device
            written = cast("dict[str, Any]", state.stateful_callbacks)
            if state.global_step:
                own, run = _own_file(self._loaded_folder(args)), written.get(KEY, {}).get("run")
                restore_own(own, _mark(state, run), self.state.load_state_dict, device)
            self._run = begin_run(device)
            written[KEY] = {"run": self._run}
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise Unsupported(
                f"FarflungCallback: the trainer wraps its model in {type(wrapped).__name__}; it has to be "
                "DistributedDataParallel: leave out fsdp and deepspeed"
            )

    @override
    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        del control, kwargs
        if self.state is not None:
            own = _own_file(Path(str(args.output_dir), f"checkpoint-{state.global_step}"))
            own.parent.mkdir(parents=True, exist_ok=True)
            save_own(own, _mark(state, self._run), self.state.state_dict())

    def _loaded_folder(self, args: TrainingArguments) -> Path:
        if isinstance(self._resumed_from, bool):
            return Path(str(get_last_checkpoint(str(args.output_dir))))  # type: ignore[no-untyped-call]
        return Path(str(self._resumed_from))


def _own_file(checkpoint: Path) -> Path:
    return checkpoint / f"farflung-{dist.get_rank()}-of-{dist.get_world_size()}.safetensors"


def _mark(state: TrainerState, run: str | None) -> str:
    return f"{run}-{state.global_step}"
