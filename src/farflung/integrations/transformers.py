"""Hugging Face Transformers: a callback by which the ``Trainer``'s gradients travel compressed."""

from __future__ import annotations

import os
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from farflung.ddp import HookState, ddp_hook
from farflung.errors import Unsupported
from farflung.extras import need
from farflung.types import Codec, Reducer

need("farflung.integrations.transformers", "transformers", extra="transformers")

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

__all__ = ["FarflungCallback"]


class FarflungCallback(TrainerCallback):
    """Registers :func:`farflung.ddp_hook` with the ``DistributedDataParallel`` that the trainer wraps its model in.

    >>> trainer.add_callback(FarflungCallback(trainer, "error_feedback(topk(0.01))"))  # doctest: +SKIP

    With a single process there is no wrapper, and nothing to do.

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
        """What the codec remembers, once training has begun; goes into checkpoints of one's own."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Registers the hook.

        Raises:
          Unsupported: the trainer wraps its model in something else.
        """
        del args, state, control, kwargs
        wrapped = self._trainer.model_wrapped
        if wrapped is self._hooked:
            return
        if isinstance(wrapped, DistributedDataParallel):
            self.state, hook = ddp_hook(self._how, **self._options)
            wrapped.register_comm_hook(self.state, hook)
            self._hooked = wrapped
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise Unsupported(
                f"FarflungCallback: the trainer wraps its model in {type(wrapped).__name__}; it has to be "
                "DistributedDataParallel: leave out fsdp and deepspeed"
            )
