"""Lightning strategy that trains a ``LightningModule`` by a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from typing_extensions import override

from farflung.errors import RunLost, Unsupported
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

require_modules("farflung.integrations.lightning", "lightning", extra="lightning")

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

__all__ = ["FarflungStrategy"]

KEY = "farflung"
"""Key of the rank files' mark in a checkpoint."""


class FarflungStrategy(DDPStrategy):
    """Lightning's DDP strategy with :func:`farflung.attach` in place of its wrapper.

    >>> trainer = Trainer(strategy=FarflungStrategy("ring"), devices=2)  # doctest: +SKIP

    Every rank writes a file beside each checkpoint, ``<checkpoint>.farflung-<rank>-of-<size>``, with the state of
    codecs and schedules. ``trainer.fit(..., ckpt_path=...)`` resumes from both. With a late schedule, validation uses
    each rank's own parameters, and they become equal at the end of ``fit``.

    With ``FARFLUNG_SITE`` in the environment, all processes of this trainer are one site, each with a copy of the
    module, see ``site`` of :func:`farflung.attach`. Each site has a folder of its own for checkpoints.

    Args:
      recipe: Recipe or its name.
      attach_options: Further options of :func:`farflung.attach`, other than ``launch_env``, ``store`` and ``site``.
      strategy: Options of Lightning's ``DDPStrategy`` that do not concern its wrapper.

    Raises:
      MissingExtra: on import, without the extra ``lightning``.
    """

    def __init__(
        self,
        recipe: Recipe | str = "synchronous",
        attach_options: Mapping[str, Any] | None = None,
        **strategy: Any,
    ) -> None:
        super().__init__(**strategy)
        self._recipe, self._attach_options = recipe, dict(attach_options or {})
        self._handle: Handle | None = None
        self._run_id = ""
        self._checkpoint_path: Path | None = None

    @override
    def configure_ddp(self) -> None:
        """Leaves the model unwrapped."""

    @override
    def setup(self, trainer: Trainer) -> None:
        """Attaches to model and optimizer before training.

        Raises:
          Unsupported: there is not exactly one optimizer, or the module is sharded.
        """
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if len(self.optimizers) != 1:
            raise Unsupported(
                f"FarflungStrategy needs one optimizer: configure_optimizers() made {len(self.optimizers)}"
            )
        assert self.model is not None
        if any(hasattr(parameter, "device_mesh") for parameter in self.model.parameters()):
            raise Unsupported(
                "FarflungStrategy: the module is sharded, and Lightning would save one shard of it: use "
                "farflung.attach(site=...) in a loop of your own"
            )
        store = c10d._get_process_group_store(c10d._get_default_group()) if self.world_size > 1 else None
        self._run_id = create_run_id(self.root_device)
        env = LaunchEnv(self.global_rank, self.world_size, self.local_rank, self.num_processes)
        place = (
            {"launch_env": env, "store": store}
            if LaunchEnv.read_site() is None
            else {"site": dist.group.WORLD}
        )
        self._handle = attach(self.model, self.optimizers[0], self._recipe, **place, **self._attach_options)

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        if self._handle is None:
            yield
            return
        with self._handle.no_sync():
            yield

    # --- checkpoints --------------------------------------------------------------------------------------------

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Saves Lightning's file, with rank 0's parameters, and a file of each rank's state."""
        if self._handle is not None:
            checkpoint[KEY] = f"{self._run_id}-{checkpoint['global_step']}"
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if self._handle is not None:
            save_rank_file(
                self._get_rank_file(filepath),
                checkpoint[KEY],
                gather_rank_state(self._handle, self.optimizers[0]),
            )

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        super().remove_checkpoint(filepath)
        self._get_rank_file(filepath).unlink(missing_ok=True)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **options: Any) -> dict[str, Any]:
        """Loads Lightning's file; the rank's file is read once its optimizer has been restored."""
        self._checkpoint_path = Path(checkpoint_path)
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **options)
        return loaded

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restores the optimizer, and this rank's state from its file; warns if no rank has a file.

        Raises:
          CheckpointError: a rank's file is damaged, or missing while others exist.
        """
        super().load_optimizer_state_dict(checkpoint)
        if self._handle is None or self._checkpoint_path is None:
            return
        path = self._get_rank_file(self._checkpoint_path)
        load = partial(load_rank_state, self._handle, self.optimizers[0])
        restore_rank_file(path, checkpoint.get(KEY), load, self.root_device)

    def _get_rank_file(self, filepath: str | Path) -> Path:
        return Path(f"{filepath}.farflung-{self.global_rank}-of-{self.world_size}")

    # --- the end ------------------------------------------------------------------------------------------------

    @override
    def on_train_end(self) -> None:
        """Applies exchanges in flight; all ranks end with equal parameters."""
        if self._handle is not None:
            self._handle.finish()
        super().on_train_end()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Reports the error to the other ranks, so that they do not wait."""
        self._abort(exception)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._abort(RunLost("Lightning ended before training did"))
        super().teardown()

    def _abort(self, error: BaseException) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.__exit__(type(error), error, None)
