"""Checkpoints of a run: a folder of state trees for each saved step.

A checkpoint of step ``n`` is the folder ``step-<n>``. It has ``shared.safetensors``, equal for all replicas, and one
``rank-<r>-of-<size>.safetensors`` for each. It is complete once all of these exist; each file appears by a rename.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from farflung.errors import CheckpointError
from farflung.moments import kind_of
from farflung.state_trees import load_tree, save_tree
from farflung.types import SampleIds, State

__all__ = [
    "Checkpoints",
    "check_model",
    "check_optimizer_kind",
    "check_share",
    "fingerprint",
    "share_name",
]


def fingerprint(model: nn.Module) -> str:
    """Computes a short hash of the names, shapes, dtypes and memory formats in a model's state."""
    layout = [
        (name, tuple(t.shape), str(t.dtype), *(() if t.is_contiguous() else t.stride()))
        for name, t in model.state_dict().items()
        if isinstance(t, torch.Tensor)  # a module may keep anything else, by get_extra_state
    ]
    return hashlib.sha256(repr(layout).encode()).hexdigest()[:16]


def check_model(shared: State, model: nn.Module, where: str) -> None:
    """Checks that the shared tree of a checkpoint belongs to ``model``.

    Raises:
      CheckpointError: It belongs to another model.
    """
    if shared.get("fingerprint") != fingerprint(model):
        raise CheckpointError(
            f"{where}: the checkpoint is of another model, trained as {shared.get('workload')}; "
            "resume with the workload it was made with"
        )


def check_optimizer_kind(own: State, optimizer: torch.optim.Optimizer, where: str) -> None:
    """Checks that a replica's tree of a checkpoint was saved with an optimizer of the same class.

    Raises:
      CheckpointError: Its optimizer is of another class.
    """
    kind = kind_of(optimizer)
    if own["optimizer"]["kind"] != kind:
        raise CheckpointError(
            f"{where}: its optimizer is {own['optimizer']['kind']}, not {kind}; resume with the --optimizer that the "
            "run was started with"
        )


def share_name(share: SampleIds | None) -> str:
    """Computes a short hash of the samples that a replica draws from; empty for the whole set."""
    return "" if share is None else hashlib.sha256(share.numpy().tobytes()).hexdigest()[:16]


def check_share(own: State, share: SampleIds | None, where: str) -> None:
    """Checks that a replica's tree of a checkpoint was trained on ``share``.

    Raises:
      CheckpointError: It was trained on another share.
    """
    if own.get("share", "") != share_name(share):
        raise CheckpointError(
            f"{where}: this replica drew from another share of the data; resume with the --partition and --seed "
            "that the run was started with"
        )


class Checkpoints:
    """Checkpoint files of one run, for one rank.

    Args:
      folder: Folder of the checkpoints, shared by the replicas of one machine.
      rank: Rank of this replica.
      size: Number of replicas.
      is_leader: Writes the shared file on this machine and removes old checkpoints.
      num_kept: Number of checkpoints to keep.
      allows_any_size: Loads checkpoints of another number of replicas too.
    """

    def __init__(
        self, folder: Path, rank: int, size: int, *, leader: bool, keep: int = 2, any_size: bool = False
    ) -> None:
        self.folder = folder
        self._any_size = any_size
        self._rank, self._size, self._leader, self._keep = rank, size, leader, keep

    def among(self, rank: int, size: int) -> Checkpoints:
        """Returns these checkpoints for one of ``size`` remaining replicas; rank 0 writes the shared file too."""
        is_leader = self._leader or rank == 0
        return Checkpoints(
            self.folder, rank, size, leader=is_leader, keep=self._keep, any_size=self._any_size
        )

    def save(self, step: int, shared: State, own: State) -> Path:
        """Writes this replica's part; the checkpoint is complete once all ranks have written theirs."""
        folder = self.folder / f"step-{step:08d}"
        if self._leader:
            save_tree(folder / "shared.safetensors", shared)
        save_tree(folder / self._own_name(), own)
        return folder

    def prune(self) -> None:
        """Removes all but the newest ``num_kept`` checkpoints; to be called once all ranks have saved."""
        if self._leader:
            newest_steps = self.complete()[-self._keep :]
            for folder in self.folder.glob("step-*"):
                if newest_steps and folder.name < f"step-{newest_steps[0]:08d}":
                    shutil.rmtree(folder, ignore_errors=True)

    def complete(self) -> list[int]:
        """Lists the steps whose files are all in place, oldest first."""
        steps = []
        for folder in self.folder.glob("step-*"):
            match = re.fullmatch(r"step-(\d+)", folder.name)
            files: set[str] = set()
            with suppress(FileNotFoundError):  # another machine may prune it at this moment
                files = {file.name for file in folder.iterdir()}
            ranks = {int(m[1]): int(m[2]) for file in files if (m := _RANK_FILE.fullmatch(file))}
            sizes = set(ranks.values())
            if match and "shared.safetensors" in files and len(sizes) == 1 and len(ranks) == sizes.pop():
                steps.append(int(match[1]))
        return sorted(steps)

    def newest(self) -> int:
        """Finds the step of the newest complete checkpoint.

        Raises:
          CheckpointError: No checkpoint is complete.
        """
        steps = self.complete()
        if not steps:
            raise CheckpointError(f"{self.folder}: no complete checkpoint to resume from")
        return steps[-1]

    def load(self, step: int) -> tuple[State, State]:
        """Loads the shared tree and this replica's tree.

        Raises:
          CheckpointError: The checkpoint is damaged, or was saved by another number of replicas.
        """
        folder = self.folder / f"step-{step:08d}"
        if self._any_size:
            return load_tree(folder / "shared.safetensors"), self._own_of_any_size(folder)
        if not (folder / self._own_name()).exists():
            raise CheckpointError(
                f"{folder}: saved by another number of replicas than {self._size}; resume with as many as before"
            )
        return load_tree(folder / "shared.safetensors"), load_tree(folder / self._own_name())

    def _own_of_any_size(self, folder: Path) -> State:
        """Loads this replica's tree; if absent, rank 0's without its random state and residuals."""
        rank_file = next(iter(folder.glob(f"rank-{self._rank}-of-*")), None)
        rank0_file = next(iter(folder.glob("rank-0-of-*")))
        state = load_tree(rank_file or rank0_file)
        if rank0_file.name != f"rank-0-of-{self._size}.safetensors":
            state["sent"] = {}
        if rank_file is None:
            del state["random"]
            state["exchanges"] = {**state["exchanges"], "reducer": {}}
        return state

    def _own_name(self) -> str:
        return f"rank-{self._rank}-of-{self._size}.safetensors"


_RANK_FILE = re.compile(r"rank-(\d+)-of-(\d+)\.safetensors")
