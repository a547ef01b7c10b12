"""Files that each rank keeps beside the checkpoint of another library's loop.

A mark, written into both, ties them together: what lies beside a checkpoint may be of another run that was there.
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
from farflung.loop.optimizers import load_optimizer_state, optimizer_state
from farflung.state_trees import load_tree, save_tree
from farflung.types import State

__all__ = ["begin_run", "gather_own", "load_own", "restore_own", "save_own"]


def gather_own(handle: Handle, optimizer: torch.optim.Optimizer) -> State:
    """Returns what a rank keeps of its own: with local steps its optimizer's state too."""
    kept: State = {"handle": handle.state_dict()}
    return kept if handle.is_synchronous else kept | {"optimizer": optimizer_state(optimizer)}


def load_own(handle: Handle, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Continues from :func:`gather_own`."""
    if "optimizer" in state:
        load_optimizer_state(optimizer, state["optimizer"])
    handle.load_state_dict(state["handle"])


def begin_run(device: torch.device) -> str:
    """Returns a name that no other run has, equal on all ranks of the process group, which all call this.

    Args:
      device: of tensors that the process group broadcasts.
    """
    number = torch.tensor([secrets.randbits(62)], device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(number, 0)
    return f"{int(number):016x}"


def save_own(own: Path, mark: str, state: State) -> None:
    """Writes the file of this rank, with the mark of its checkpoint."""
    save_tree(own, {"mark": mark, "state": state})


def restore_own(own: Path, mark: object, load: Callable[[State], object], device: torch.device) -> None:
    """Goes on from a rank's own file where all ranks have theirs; where none has, warns that memory begins anew. All
    ranks of the process group call this.

    Args:
      own: the file of this rank.
      mark: of the checkpoint; a file with another one is of another checkpoint, and so is not there.
      load: takes its content.
      device: of tensors that the process group sums.

    Raises:
      CheckpointError: the file is damaged, or absent while others have theirs.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    kept: State = {}
    damage: CheckpointError | None = None
    try:
        kept = load_tree(own) if own.exists() else kept
    except CheckpointError as error:
        damage = error
    is_there = damage is not None or (bool(kept) and kept.get("mark") == mark)
    there = torch.tensor([float(is_there)], device=device)
    if size > 1:
        dist.all_reduce(there)
    if there.item() == size:
        if damage is not None:
            raise damage
        load(kept["state"])
    elif there.item():
        raise CheckpointError(f"{own}: there for some ranks and not for all: restore the others' files")
    elif rank == 0:
        why = "is of another checkpoint" if kept else "is not there"
        warnings.warn(f"{own} {why}: what codecs and schedules remember begins anew", stacklevel=2)
