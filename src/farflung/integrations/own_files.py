"""Files that each rank keeps beside the checkpoint of another library's loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from farflung.errors import CheckpointError
from farflung.replica import load_tree
from farflung.types import State

__all__ = ["restore_own"]


def restore_own(own: Path, load: Callable[[State], object], device: torch.device) -> None:
    """Goes on from a rank's own file where all ranks have theirs; where none has, warns that memory begins anew. All
    ranks of the process group call this.

    Args:
      own: the file of this rank.
      load: takes its content.
      device: of tensors that the process group sums.

    Raises:
      CheckpointError: the file is damaged, or absent while others have theirs.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    there = torch.tensor([float(own.exists())], device=device)
    if size > 1:
        dist.all_reduce(there)
    if there.item() == size:
        load(load_tree(own))
    elif there.item():
        raise CheckpointError(f"{own}: there for some ranks and not for all: restore the others' files")
    elif rank == 0:
        warnings.warn(f"no {own}: what codecs and schedules remember begins anew", stacklevel=2)
