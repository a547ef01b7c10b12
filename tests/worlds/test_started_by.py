"""Processes that Slurm or MPI has started find each other, as torchrun's do."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from farflung import attach, train
from tests.listening import listening
from tests.pool import Pool, digest

SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "{rank}",
    "SLURM_LOCALID": "{rank}",
    "SLURM_NTASKS": "{size}",
    "SLURM_STEP_NUM_NODES": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "{rank}",
    "OMPI_COMM_WORLD_SIZE": "{size}",
    "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "{size}",
    "MASTER_ADDR": "127.0.0.1",
}
BY_HAND = {"RANK": "{rank}", "WORLD_SIZE": "{size}", "MASTER_ADDR": "127.0.0.1"}


def trained(
    rank: int, size: int, store: dist.Store, *, environment: dict[str, str]
) -> tuple[int, int, str, set[str]]:
    """A job of the pool: what ``attach`` makes of the environment, the model afterwards, what is listened on."""
    os.environ.update({name: value.format(rank=rank, size=size) for name, value in environment.items()})
    del store
    before = listening()
    torch.manual_seed(rank)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer) as handle:
        model(torch.full((4, 3), float(rank))).sum().backward()
        optimizer.step()
        addresses = {address for address, _ in listening() - before}
    return handle.rank, handle.size, digest(dict(model.state_dict())), addresses


@pytest.mark.parametrize("environment", [SLURM, OPEN_MPI, BY_HAND], ids=["srun", "mpirun", "by hand"])
def test_they_train_together(environment: dict[str, str], pool: Pool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    found: list[Any] = pool.run(2, f"{__name__}.trained", environment={**environment, "MASTER_PORT": port})
    assert [(rank, size) for rank, size, _, _ in found] == [(0, 2), (1, 2)]
    assert found[0][2] == found[1][2]
    assert found[0][3] | found[1][3] == {"127.0.0.1"}


def kept(rank: int, size: int, store: dist.Store, *, environment: dict[str, str], cwd: str) -> list[str]:
    """Makes two runs as a job of the pool, on ranks whose clocks differ; where each is kept."""
    os.environ.update({name: value.format(rank=rank, size=size) for name, value in environment.items()})
    del store
    found = []
    with contextlib.chdir(cwd):
        for hour in (1, 2):
            with mock.patch("time.strftime", return_value=f"{hour}-by-the-clock-of-{rank}"):
                run = train("synthetic/quadratic", steps=2, checkpoint_every=1)
            found.append(str(run.folder))
    return found


@pytest.mark.parametrize(
    "environment",
    [SLURM, OPEN_MPI, {**BY_HAND, "TORCHELASTIC_RUN_ID": "none"}],
    ids=["srun", "mpirun", "torchrun"],
)
def test_rank_0_names_the_folder_of_each_run(environment: dict[str, str], pool: Pool, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    found: list[Any] = pool.run(
        2, f"{__name__}.kept", environment={**environment, "MASTER_PORT": port}, cwd=str(tmp_path)
    )
    folders = [f"runs/synthetic-quadratic-synchronous-{hour}-by-the-clock-of-0" for hour in (1, 2)]
    assert found == [folders, folders]
    for folder in folders:
        assert sorted(path.name for path in (tmp_path / folder / "telemetry").iterdir()) == [
            "rank-0.jsonl",
            "rank-1.jsonl",
        ]
        assert (
            sorted(path.name for path in (tmp_path / folder / "checkpoints").iterdir())[-1] == "step-00000002"
        )
