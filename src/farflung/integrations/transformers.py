"""Hugging Face Transformers: a callback by which the ``Trainer``'s gradients travel compressed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from farflung.ddp import HookState, ddp_hook
from farflung.errors import Unsupported
from farflung.extras import need
from farflung.integrations.own_files import restore_own
from farflung.replica import save_tree
from farflung.types import Codec, Reducer

need("farflung.integrations.transformers", "transformers", extra="transformers")

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

__all__ = ["FarflungCallback"]


class FarflungCallback(TrainerCallback):
    """Registers :func:`farflung.ddp_hook` with the ``DistributedDataParallel`` that the trainer wraps its model in.

    >>> trainer.add_callback(FarflungCallback(trainer, "error_feedback(topk(0.01))"))  # doctest: +SKIP

    With a single process there is no wrapper, and nothing to do. Each rank keeps what its codec remembers in the
    trainer's checkpoints, as ``farflung-<rank>-of-<size>.safetensors``, and a resumed training goes on from there.

    Args:
      trainer: whose ``model_wrapped`` is looked at when training begins.
      how: a codec or reducer, or its name with options.
      options: further ones of :func:`farflung.ddp_hook`.

    Raises:
      MissingExtra: on import, without the extra ``transformers``.
    """

    def __init__(self, trainer: Trainer, how: Codec | Reducer | str, **options: Any) -> None:
        self._trainer, self._how, self._options = trainer, how, options
        self._hooked: DistributedDataParallel | None = None
        self.state: HookState | None = None
        """What the codec remembers, once training has begun."""

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Registers the hook.

        Raises:
          Unsupported: the trainer wraps its model in something else.
          CheckpointError: a rank's file of the checkpoint is damaged, or absent while others have theirs.
        """
        del control, kwargs
        wrapped = self._trainer.model_wrapped
        if wrapped is self._hooked:
            return
        if isinstance(wrapped, DistributedDataParallel):
            self.state, hook = ddp_hook(self._how, **self._options)
            wrapped.register_comm_hook(self.state, hook)
            self._hooked = wrapped
            if state.global_step:
                device = next(wrapped.parameters()).device
                restore_own(_own_file(args, state), self.state.load_state_dict, device)
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
            own = _own_file(args, state)
            own.parent.mkdir(parents=True, exist_ok=True)
            save_tree(own, self.state.state_dict())


def _own_file(args: TrainingArguments, state: TrainerState) -> Path:
    name = f"farflung-{dist.get_rank()}-of-{dist.get_world_size()}.safetensors"
    return Path(str(args.output_dir), f"checkpoint-{state.global_step}", name)
