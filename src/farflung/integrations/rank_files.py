"""Files of each rank beside the checkpoint of another library's loop.

A mark in both identifies them, since a file beside a checkpoint may be of an earlier run.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from farflung.errors import CheckpointError
from farflung.handle import Handle
from farflung.loop.optimizers import get_optimizer_state, load_optimizer_state
from farflung.state_trees import load_tree, save_tree
from farflung.types import State

__all__ = ["create_run_id", "gather_rank_state", "load_rank_state", "restore_rank_file", "save_rank_file"]


def gather_rank_state(handle: Handle, optimizer: torch.optim.Optimizer) -> State:
    """Returns the local state of a rank; with local steps this includes its optimizer's state."""
    state: State = {"handle": handle.state_dict()}
    return state if handle.is_synchronous else state | {"optimizer": get_optimizer_state(optimizer)}


def load_rank_state(handle: Handle, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Restores the local state that :func:`gather_rank_state` returned."""
    if "optimizer" in state:
        load_optimizer_state(optimizer, state["optimizer"])
    handle.load_state_dict(state["handle"])


def create_run_id(device: torch.device) -> str:
    """Creates a unique run name, equal on all ranks of the process group, which all call this.

    Args:
      device: Device of tensors that the process group broadcasts.
    """
    number = torch.tensor([secrets.randbits(62)], device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(number, 0)
    return f"{int(number):016x}"


def save_rank_file(path: Path, mark: str, state: State) -> None:
    """Saves the file of this rank, with the mark of its checkpoint."""
    save_tree(path, {"mark": mark, "state": state})


def restore_rank_file(
    path: Path, mark: object, load: Callable[[State], object], device: torch.device
) -> None:
    """Restores each rank's state from its file; warns if no rank has one, and raises if only some do.

    Args:
      path: File of this rank.
      mark: Mark of the checkpoint; a file with another mark is of another checkpoint and counts as missing.
      load: Function that takes the state in the file.
      device: Device of tensors that the process group sums.

    Raises:
      CheckpointError: the file is damaged, or missing while others exist.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    content: State = {}
    damage: CheckpointError | None = None
    try:
        content = load_tree(path) if path.exists() else content
    except CheckpointError as error:
        damage = error
    is_present = damage is not None or (bool(content) and content.get("mark") == mark)
    num_present = torch.tensor([float(is_present)], device=device)
    if size > 1:
        dist.all_reduce(num_present)
    if num_present.item() == size:
        if damage is not None:
            raise damage
        load(content["state"])
    elif num_present.item():
        raise CheckpointError(f"{path}: there for some ranks and not for all: restore the others' files")
    elif rank == 0:
        reason = "is of another checkpoint" if content else "is not there"
        warnings.warn(f"{path} {reason}: what codecs and schedules remember begins anew", stacklevel=2)
