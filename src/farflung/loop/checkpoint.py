"""Checkpoints of a run: a folder of state trees for each saved step.

A checkpoint of step ``n`` is the folder ``step-<n>``. It has ``shared.safetensors``, equal for all replicas, and one
``rank-<r>-of-<size>.safetensors`` for each. It is complete once all of these exist; each file appears by a rename.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import torch
from torch import nn

from farflung.errors import CheckpointError
from farflung.files import wrap_read_errors
from farflung.moments import get_optimizer_name
from farflung.state_trees import load_tree, save_tree
from farflung.types import SampleIds, State

__all__ = [
    "Checkpoints",
    "check_model",
    "check_optimizer_kind",
    "check_share",
    "compute_fingerprint",
    "hash_share",
    "wrap_version_errors",
]


def compute_fingerprint(model: nn.Module) -> str:
    """Computes a short hash of the names, shapes, dtypes and memory formats in a model's state."""
    layout = [
        (name, tuple(t.shape), str(t.dtype), *(() if t.is_contiguous() else t.stride()))
        for name, t in model.state_dict().items()
        if isinstance(t, torch.Tensor)  # a module may keep anything else, by get_extra_state
    ]
    return hashlib.sha256(repr(layout).encode()).hexdigest()[:16]


def wrap_version_errors(origin: Path | str) -> AbstractContextManager[None]:
    """Converts errors from entries that a checkpoint lacks, within the context, to one that names it.

    Raises:
      CheckpointError: An entry is missing or of another kind.
    """
    problem = "not a checkpoint of this version of farflung: resume with the one that saved it"
    return wrap_read_errors(origin, problem, CheckpointError)


def check_model(shared_state: State, model: nn.Module, origin: str) -> None:
    """Checks that the shared tree of a checkpoint belongs to ``model``.

    Raises:
      CheckpointError: It belongs to another model.
    """
    if shared_state.get("fingerprint") != compute_fingerprint(model):
        raise CheckpointError(
            f"{origin}: the checkpoint is of another model, trained as {shared_state.get('workload')}; "
            "resume with the workload it was made with"
        )


def check_optimizer_kind(replica_state: State, optimizer: torch.optim.Optimizer, origin: str) -> None:
    """Checks that a replica's tree of a checkpoint was saved with an optimizer of the same class.

    Raises:
      CheckpointError: Its optimizer is of another class.
    """
    kind = get_optimizer_name(optimizer)
    with wrap_version_errors(origin):
        stored_kind = replica_state["optimizer"]["kind"]
    if stored_kind != kind:
        raise CheckpointError(
            f"{origin}: its optimizer is {stored_kind}, not {kind}; resume with the "
            f"--optimizer that the "
            "run was started with"
        )


def hash_share(share: SampleIds | None) -> str:
    """Computes a short hash of the samples that a replica draws from; empty for the whole set."""
    return "" if share is None else hashlib.sha256(share.numpy().tobytes()).hexdigest()[:16]


def check_share(replica_state: State, share: SampleIds | None, origin: str) -> None:
    """Checks that a replica's tree of a checkpoint was trained on ``share``.

    Raises:
      CheckpointError: It was trained on another share.
    """
    if replica_state.get("share", "") != hash_share(share):
        raise CheckpointError(
            f"{origin}: this replica drew from another share of the data; resume with the --partition and --seed "
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
        self,
        folder: Path,
        rank: int,
        size: int,
        *,
        is_leader: bool,
        num_kept: int = 2,
        allows_any_size: bool = False,
    ) -> None:
        self.folder = folder
        self._allows_any_size = allows_any_size
        self._rank, self._size, self._is_leader, self._num_kept = rank, size, is_leader, num_kept

    def with_ranks(self, rank: int, size: int) -> Checkpoints:
        """Returns these checkpoints for one of ``size`` remaining replicas; rank 0 writes the shared file too."""
        is_leader = self._is_leader or rank == 0
        return Checkpoints(
            self.folder,
            rank,
            size,
            is_leader=is_leader,
            num_kept=self._num_kept,
            allows_any_size=self._allows_any_size,
        )

    def save(self, step: int, shared_state: State, replica_state: State) -> Path:
        """Writes this replica's part; the checkpoint is complete once all ranks have written theirs."""
        folder = self.folder / f"step-{step:08d}"
        for file in folder.glob("rank-*-of-*.safetensors"):
            if not file.name.endswith(f"-of-{self._size}.safetensors"):
                file.unlink(missing_ok=True)  # of an earlier attempt with other replicas, which broke off
        if self._is_leader:
            save_tree(folder / "shared.safetensors", shared_state)
        save_tree(folder / self._format_file_name(), replica_state)
        return folder

    def prune(self) -> None:
        """Removes all but the newest ``num_kept`` checkpoints; to be called once all ranks have saved."""
        if self._is_leader:
            newest_steps = self.list_complete()[-self._num_kept :]
            for folder in self.folder.glob("step-*"):
                if newest_steps and folder.name < f"step-{newest_steps[0]:08d}":
                    shutil.rmtree(folder, ignore_errors=True)

    def list_complete(self) -> list[int]:
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

    def find_newest(self) -> int:
        """Finds the step of the newest complete checkpoint.

        Raises:
          CheckpointError: No checkpoint is complete.
        """
        steps = self.list_complete()
        if not steps:
            raise CheckpointError(f"{self.folder}: no complete checkpoint to resume from")
        return steps[-1]

    def load(self, step: int) -> tuple[State, State]:
        """Loads the shared tree and this replica's tree.

        Raises:
          CheckpointError: The checkpoint is damaged, or was saved by another number of replicas.
        """
        folder = self.folder / f"step-{step:08d}"
        if self._allows_any_size:
            with wrap_version_errors(folder):
                return load_tree(folder / "shared.safetensors"), self._load_any_size(folder)
        if not (folder / self._format_file_name()).exists():
            raise CheckpointError(
                f"{folder}: saved by another number of replicas than {self._size}; resume with as many as before"
            )
        return load_tree(folder / "shared.safetensors"), load_tree(folder / self._format_file_name())

    def _load_any_size(self, folder: Path) -> State:
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

    def _format_file_name(self) -> str:
        return f"rank-{self._rank}-of-{self._size}.safetensors"


_RANK_FILE = re.compile(r"rank-(\d+)-of-(\d+)\.safetensors")
