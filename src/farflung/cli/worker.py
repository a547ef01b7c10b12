"""One worker process: joins the run that torchrun describes in the environment, and trains."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from farflung.cli.run import RunConfig, RunFolder, write_json
from farflung.errors import CheckpointError, FarflungError, RunLost
from farflung.replica import Replica
from farflung.runtime import WallRuntime
from farflung.telemetry import Event, JsonLines, Sink, Telemetry
from farflung.types import Json

__all__ = ["EVENTS", "main", "work"]

EVENTS = "FARFLUNG_EVENTS"
"""Names the datagram socket on which the starting command listens for events."""
JOIN_S = 60.0


def main() -> int:
    """Trains in a folder that the starting command has made; tells it of every event and of any error."""
    folder = RunFolder(Path(sys.argv[1]), resumed=sys.argv[2:] == ["resume"])
    tell = _teller(os.environ[EVENTS])
    rank = int(os.environ["RANK"])
    tell({"event": "hello", "rank": rank, "pid": os.getpid()})
    try:
        work(RunConfig(**folder.stored_config()), folder, tell)  # type: ignore[arg-type]
    except FarflungError as error:
        tell(_error_event(rank, error, str(error), error.exit_code))
        print(f"rank {rank}: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        what = f"rank {rank} failed: {type(error).__name__}: {error} (see {folder.log})"
        tell(_error_event(rank, error, what, 1))
        return 1
    return 0


def work(config: RunConfig, folder: RunFolder, show: Sink) -> Mapping[str, Json]:
    """Trains as one replica; ``show`` gets its events. Returns the summary."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    leader = int(os.environ.get("LOCAL_RANK", rank)) == 0
    asked = _stop_on_signals()
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
        with JsonLines(folder.telemetry(rank)) as file:
            replica = Replica(
                runtime,
                config.make_workload(),
                config.make_training(),
                recipe.parts(config.seed),
                Telemetry(rank, file, show),
                folder.checkpoints(rank, size, leader=leader),
                asked.is_set,
            )
            if folder.resumed:
                _resume(replica)
            summary = runtime.run(replica.run()).to_json()
    except BaseException as error:
        runtime.close(error)
        raise
    runtime.close()
    if rank == 0:
        write_json(folder.summary, summary)
    return summary


def _resume(replica: Replica) -> None:
    assert replica.checkpoints is not None
    steps = replica.checkpoints.complete()
    if not steps:
        raise CheckpointError(f"{replica.checkpoints.folder}: no complete checkpoint to resume from")
    replica.resume(steps[-1])


def _stop_on_signals() -> threading.Event:
    asked = threading.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: asked.set())
    return asked


def _teller(address: str) -> Sink:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    link.connect(address)

    def tell(event: Event) -> None:
        try:
            link.send(json.dumps(event).encode())
        except OSError as error:
            raise RunLost(f"the command that started this worker is gone ({error})") from None

    return tell


def _error_event(rank: int, error: BaseException, message: str, exit_code: int) -> Event:
    own = not isinstance(error, RunLost) or getattr(error, "step", None) is not None
    return {"event": "error", "rank": rank, "message": message, "exit_code": exit_code, "own": own}


if __name__ == "__main__":
    sys.exit(main())
