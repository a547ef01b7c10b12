"""Joins the run that torchrun describes in the environment, and trains as one of its replicas."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from farflung.cli.run import RunConfig, RunFolder, write_json
from farflung.replica import Replica
from farflung.runtime import WallRuntime
from farflung.telemetry import JsonLines, Sink, Telemetry
from farflung.types import Json

__all__ = ["work"]

JOIN_S = 60.0


def work(config: RunConfig, folder: RunFolder, show: Sink) -> Mapping[str, Json]:
    """Trains as one replica; ``show`` gets its events. Returns the summary."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    leader = int(os.environ.get("LOCAL_RANK", rank)) == 0
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
            native=recipe.collective == "native",
            join_s=JOIN_S,
        )
        try:
            checkpoints = folder.checkpoints(rank, size, leader=leader)
            replica = Replica(
                runtime,
                config.make_workload(),
                config.make_training(),
                recipe.parts(config.seed),
                telemetry,
                checkpoints,
                asked.is_set,
            )
            if folder.resumed:
                replica.resume(checkpoints.newest())
            summary = runtime.run(replica.run()).to_json()
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
