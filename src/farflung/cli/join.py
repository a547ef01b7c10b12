"""Joins the run that torchrun describes in the environment, and trains as one of its replicas."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from farflung.cli.run import RunConfig, RunFolder, write_json
from farflung.comm import collective_named
from farflung.comm.interface import LOOPBACK, route_to
from farflung.comm.keys import Keys
from farflung.data import describe
from farflung.network import device_profile, network_profile
from farflung.reducers import summed_nbytes
from farflung.replica import Replica, place
from farflung.runtime import WallRuntime
from farflung.telemetry import JsonLines, Sink, Telemetry
from farflung.timing import forward_flops
from farflung.types import Json, Workload

__all__ = ["DEVICE", "MODEL", "NETWORK", "PACE", "Reach", "work"]

DEVICE = "FARFLUNG_DEVICE"
"""Tells workers what to train on."""
PACE = "FARFLUNG_PACE"
"""Tells workers of the device whose pace to keep."""
NETWORK = "FARFLUNG_NETWORK"
"""Tells workers what lies between them, where that is known: a name or a TOML file."""
MODEL = "FARFLUNG_NETWORK_MODEL"
"""Tells workers where the model of the network is whose pace to keep."""
JOIN_S = 60.0


@dataclass(frozen=True)
class Reach:
    """How this machine is reached by the others of a run.

    Args:
      interface: the address or network interface to listen on; ``None``: the one on the way to the master address.
      keys: what to prove this machine with where the run's store is not trusted.
    """

    interface: str | None = None
    keys: Keys | None = None

    def address(self, size: int) -> str:
        """Where a replica listens.

        Raises:
          ConfigError: the master address is unknown, or there is no way to it.
        """
        if self.interface is not None:
            return self.interface
        return LOOPBACK if size == 1 else route_to(os.environ["MASTER_ADDR"])


def work(
    config: RunConfig,
    folder: RunFolder,
    show: Sink,
    reach: Reach | None = None,
    task: Workload | None = None,
    device: str = "cpu",
    pace: str = "",
    network: str = "",
    model: str = "",
) -> Mapping[str, Json]:
    """Trains as one replica; returns the summary.

    Args:
      config: of the run.
      folder: where it is kept.
      show: gets this replica's events.
      reach: how the others reach this machine.
      task: the run's own, where it has been made.
      device: what to train on; see :func:`farflung.replica.place`.
      pace: a device whose pace to keep; empty: as fast as this machine is.
      network: what lies between the replicas; empty: that is not known.
      model: the folder of a model of a network whose pace to keep; empty: none.
    """
    reach, task = reach or Reach(), task or config.make_workload()
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_size = (
        int(os.environ.get(name, here)) for name, here in (("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", size))
    )
    leader = local_rank == 0
    placed = place(device, local_rank=local_rank, local_size=local_size)
    if placed.type == "cuda":
        torch.cuda.set_device(placed)
    asked = _stop_on_signals()
    with JsonLines(folder.telemetry(rank)) as file:
        telemetry = Telemetry(rank, file, show)
        telemetry.emit("hello", pid=os.getpid())
        store: dist.Store | None = None
        if size > 1:
            store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=JOIN_S))))
        recipe = config.make_recipe()
        runtime = WallRuntime(
            rank,
            size,
            store,
            settings=config.to_json(),
            deadline_s=config.deadline,
            native=collective_named(recipe.collective).by_backend,
            join_s=JOIN_S,
            interface=reach.address(size),
            encrypt=config.encrypt,
            keys=reach.keys,
            decisions=folder.decision_log() if rank == 0 else None,
            device=device_profile(pace, forward_flops=forward_flops(task)) if pace else None,
            seed=config.seed,
            model=Path(model) if model else None,
        )
        try:
            checkpoints = folder.checkpoints(rank, size, leader=leader)
            shares = config.make_shares(task)
            replica = Replica(
                runtime,
                task,
                config.make_training(),
                recipe.parts(config.seed, None if shares is None else rank),
                telemetry,
                checkpoints,
                asked.is_set,
                None if shares is None else shares[rank],
                device=placed,
            )
            if folder.resumed:
                replica.resume(checkpoints.newest())
            split = config.split_json(describe(shares or [], task.datasets()[0].labels))
            collective = runtime.settle_collective(
                recipe.collective,
                summed_nbytes(replica.parts.reducer, replica.bucket_specs, size),
                network=network_profile(network) if network else None,
                step=replica.step_done,
            )
            summary = {
                **runtime.run(replica.run()).to_json(),
                "collective": collective,
                "partition": split,
            }
            if runtime.pace is not None:
                telemetry.emit("pace", t=runtime.now(), **runtime.pace.to_json())
                summary["pace"] = runtime.pace.to_json()
        except BaseException as error:
            runtime.close(error)
            raise
        runtime.close()
    if rank == 0:
        write_json(folder.summary, summary)
    return summary


def _stop_on_signals() -> threading.Event:
    asked = threading.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: asked.set())
    return asked
