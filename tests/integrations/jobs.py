"""What replicas do in the tests of integrations: each job is one rank of a process that torchrun would have started."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from farflung.errors import CheckpointError
from farflung.integrations.rank_files import create_run_id, restore_rank_file, save_rank_file
from tests.pool import leave_group

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def restore_files(
    rank: int, size: int, store: dist.Store, *, folder: str, cases: list[list[str | None]]
) -> list[str]:
    """Returns what this rank is told that reads files marked ``mine``, where each rank has its own file by a mark of
    the case, or none; and the names of two runs of this process group.
    """
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    found = []
    for number, marks in enumerate(cases):
        own = Path(folder) / f"{number}-{rank}"
        if (mark := marks[rank]) is not None:
            save_rank_file(own, mark, {"kept": rank})
        if mark == "damaged":
            own.write_bytes(b"damaged")
        taken: list[Any] = []
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                restore_rank_file(own, "mine", taken.append, torch.device("cpu"))
            found.append(f"{taken} {[str(one.message) for one in said]}")
        except CheckpointError as error:
            found.append(str(error))
    found += [create_run_id(torch.device("cpu")) for _ in range(2)]
    leave_group()
    return found


def example(rank: int, size: int, store: dist.Store, *, name: str, port: int, args: list[str]) -> list[float]:
    """Runs an example; the parameters of its model, and the exchanges of its handle where it has one."""
    del store
    of_torchrun = {
        "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }  # fmt: skip
    os.environ.update({key: str(value) for key, value in of_torchrun.items()})
    torch.manual_seed(rank)
    with mock.patch.object(sys, "argv", [name, *args]):
        left: dict[str, Any] = runpy.run_path(str(EXAMPLES / name))
    found = torch.cat([p.detach().flatten() for p in left["model"].parameters()]).tolist()
    if "handle" in left:
        found.append(left["handle"].step)
    left.clear()
    if dist.is_initialized():
        leave_group()
    if "accelerate" in sys.modules:
        importlib.import_module("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)
    return list(found)


def example_in_site(
    rank: int,
    size: int,
    store: dist.Store,
    *,
    name: str,
    ports: list[int],
    folder: str,
    args: list[str],
    half: str,
) -> list[float]:
    """Runs an example in one of the sites of two processes that meet at the last port; from a checkpoint if named."""
    site, share = divmod(rank, 2)
    os.environ["FARFLUNG_SITE"] = f"{site}/{size // 2}@127.0.0.1:{ports[-1]}"
    own = Path(folder, str(site))
    args = [*args, "--folder", str(own), *(["--resume", str(next(own.glob(half)))] if half else [])]
    return example(share, 2, store, name=name, port=ports[site], args=args)
