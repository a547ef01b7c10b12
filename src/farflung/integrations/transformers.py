"""Callback for Hugging Face Transformers, by which the ``Trainer`` trains by a recipe."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from typing_extensions import override

from farflung.errors import ConfigError, Unsupported
from farflung.extras import require_modules
from farflung.handle import Handle, attach
from farflung.integrations.rank_files import (
    create_run_id,
    gather_rank_state,
    load_rank_state,
    restore_rank_file,
    save_rank_file,
)
from farflung.recipes import Recipe
from farflung.wall import LaunchEnv

require_modules("farflung.integrations.transformers", "transformers", extra="transformers")

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

__all__ = ["FarflungCallback"]

KEY = "farflung"
"""Key of the run in the trainer's state in checkpoints."""


class FarflungCallback(TrainerCallback):
    """Callback that trains as the trainer's DDP, with :func:`farflung.attach` in place of its wrapper.

    >>> trainer.add_callback(FarflungCallback(trainer, "diloco(sync_every=50)"))  # doctest: +SKIP

    It does nothing with a single process. Evaluations and checkpoints use the model of
    :meth:`farflung.Handle.use_averaged_model`. Each rank stores its local state in the trainer's checkpoints, as
    ``farflung-<rank>-of-<size>.safetensors``. A training resumed from a checkpoint restores it, in any location. All
    ranks end with equal parameters.

    With ``FARFLUNG_SITE`` in the environment, all processes of this trainer are one site, each with a copy of the
    model, see ``site`` of :func:`farflung.attach`. Each site has an output folder of its own.

    Args:
      trainer: Trainer whose model is left unwrapped. Its ``train`` passes the loaded checkpoint to the callback; its
        ``evaluate`` and ``save_model`` use the averaged model.
      recipe: Recipe or its name.
      options: Further options of :func:`farflung.attach`, other than ``launch_env``, ``store`` and ``site``.

    Raises:
      MissingExtra: on import, without the extra ``transformers``.
    """

    def __init__(self, trainer: Trainer, recipe: Recipe | str = "synchronous", **options: Any) -> None:
        self._trainer, self._recipe, self._options = trainer, recipe, options
        self._resume_path: str | bool | None = None
        self._run_id = ""
        self.handle: Handle | None = None
        """Handle of :func:`farflung.attach`, once training has begun."""
        # There are no events for these, nor a setting that leaves the model unwrapped.
        self._train, self._evaluate, self._save_model = trainer.train, trainer.evaluate, trainer.save_model
        trainer.train = self._train_with_handle  # type: ignore[method-assign]
        trainer.evaluate = self._evaluate_averaged  # type: ignore[method-assign]
        trainer.save_model = self._save_averaged  # type: ignore[method-assign]
        accelerator = trainer.accelerator
        accelerator.prepare_model = partial(accelerator.prepare_model, evaluation_mode=True)

    @property
    def _model(self) -> nn.Module:
        return cast(nn.Module, self._trainer.model)

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        return cast(torch.optim.Optimizer, self._trainer.optimizer)

    def _train_with_handle(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Replaces the trainer's ``train``: keeps the path to resume from, and reports errors to the other ranks."""
        if self not in self._trainer.callback_handler.callbacks:
            raise ConfigError("FarflungCallback: replicas would train apart: trainer.add_callback() it")
        self._resume_path = resume_from_checkpoint
        try:
            return self._train(resume_from_checkpoint, *args, **kwargs)
        except BaseException as error:
            if self.handle is not None:
                self.handle.__exit__(type(error), error, None)
            raise

    def _evaluate_averaged(self, *args: Any, **kwargs: Any) -> Any:
        with self._use_averaged_model():
            return self._evaluate(*args, **kwargs)

    def _save_averaged(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        # A call of the user's own may be one rank's alone.
        with self._use_averaged_model() if _internal_call else nullcontext():
            self._save_model(output_dir, _internal_call)

    def _use_averaged_model(self) -> Any:
        is_training = self.handle is not None and not self.handle.is_finished
        return cast(Handle, self.handle).use_averaged_model() if is_training else nullcontext()

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attaches to model and optimizer, restores the rank's file, and records the run in the trainer's state.

        Raises:
          Unsupported: the trainer shards its model.
          CheckpointError: the rank's file of the checkpoint is damaged, or missing while others exist.
        """
        del control, kwargs
        kind = self._trainer.accelerator.distributed_type
        if args.world_size == 1:
            return
        if not kind.value.startswith("MULTI_"):
            raise Unsupported(
                f"FarflungCallback: the trainer shards its model by {kind.value}: leave out fsdp and deepspeed"
            )
        if self.handle is not None:
            self.handle.finish()
        place = (
            {"store": c10d._get_process_group_store(c10d._get_default_group())}
            if LaunchEnv.read_site() is None
            else {"site": dist.group.WORLD}
        )
        self.handle = attach(self._model, self._optimizer, self._recipe, **place, **self._options)
        device = next(self._model.parameters()).device
        saved_state = cast("dict[str, Any]", state.stateful_callbacks)
        if state.global_step:
            path, run_id = _get_rank_file(self._find_checkpoint(args)), saved_state.get(KEY, {}).get("run")
            load = partial(load_rank_state, self.handle, self._optimizer)
            restore_rank_file(path, _build_mark(state, run_id), load, device)
        self._run_id = create_run_id(device)
        saved_state[KEY] = {"run": self._run_id}

    @override
    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        del control, kwargs
        if self.handle is not None and not self.handle.is_finished:
            path = _get_rank_file(Path(str(args.output_dir), f"checkpoint-{state.global_step}"))
            path.parent.mkdir(parents=True, exist_ok=True)
            save_rank_file(
                path, _build_mark(state, self._run_id), gather_rank_state(self.handle, self._optimizer)
            )

    @override
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Applies exchanges in flight; all ranks end with equal parameters, by request those of the best checkpoint."""
        del control, kwargs
        if self.handle is None:
            return
        is_best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        parameters = [p for p in self._model.parameters() if p.requires_grad and is_best]
        values = [p.detach().clone() for p in parameters]
        self.handle.finish()
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data.copy_(value)

    def _find_checkpoint(self, args: TrainingArguments) -> Path:
        """Returns the folder of the checkpoint from which training resumes."""
        if isinstance(self._resume_path, bool):
            return Path(str(get_last_checkpoint(str(args.output_dir))))  # type: ignore[no-untyped-call]
        return Path(str(self._resume_path))


def _get_rank_file(checkpoint: Path) -> Path:
    return checkpoint / f"farflung-{dist.get_rank()}-of-{dist.get_world_size()}.safetensors"


def _build_mark(state: TrainerState, run: str | None) -> str:
    return f"{run}-{state.global_step}"
