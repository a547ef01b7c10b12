"""Workers of a run on this machine, forked from a parent process that has imported torch.

The parent reads its job from a pipe as one line of JSON. If the other end of the pipe is closed, because the run was
abandoned or its command has died, the parent kills the workers and ends.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn, cast

import torch

# Modules that a configuration imports lazily are imported here, once for all workers.
import farflung.optimizers
import farflung.recipes.components
import farflung.workloads  # noqa: F401
from farflung.errors import FarflungError, ReplicaLeft, RunLost
from farflung.membership import Page, announce_end
from farflung.runs.config import RunConfig, RunOptions
from farflung.runs.events import BufferedSink, connect_event_sink
from farflung.runs.folder import RunFolder
from farflung.runs.joining import train_replica
from farflung.runs.preparing import PreparedRun
from farflung.telemetry import Event
from farflung.wall import LaunchEnv

__all__ = ["Job", "serve"]

DELIVERY_POLL_S = 0.1
"""Seconds between checks for an abandoned run while certificates are delivered."""
REPORT_WAIT_S = 5.0
"""Seconds for surviving workers to report a lost rank before this process does."""


@dataclass(frozen=True, slots=True)
class Job:
    """Run on workers of this machine.

    Args:
      folder: Folder of the run, which exists.
      is_resumed: True if the run continues from a checkpoint.
      workers: Number of workers.
      temp_folder: Temporary folder of the event socket and the rendezvous file; removed with the run.
      device: Torch device to train on.
      pace: Device profile whose speed is not exceeded; ``None`` for full speed.
      trace: True to emit an event of every exchange.
      is_elastic: True if the run continues after the loss of workers.
    """

    folder: str
    is_resumed: bool
    workers: int
    temp_folder: str
    device: str
    pace: str | None
    trace: bool
    is_elastic: bool

    @property
    def files(self) -> RunFolder:
        return RunFolder(Path(self.folder), is_resumed=self.is_resumed)

    @property
    def events(self) -> str:
        """Address of the event socket."""
        return f"{self.temp_folder}/events"


def serve(pipe: int) -> int:
    """Reads a job, forks its workers, and waits for them.

    Args:
      pipe: File descriptor of the job.

    Returns:
      Exit code: 1 if a worker was killed by a signal.
    """
    torch.optim.SGD([torch.zeros(1)])  # triggers lazy imports of torch before the fork
    with open(pipe, "rb", buffering=0, closefd=False) as jobs:
        line = jobs.readline()
    if not line.endswith(b"\n"):
        return 0
    job = Job(**json.loads(line))
    with job.files.log_path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if job.workers > 1:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    context = multiprocessing.get_context("fork")
    pages = [Page() if job.is_elastic else None for _ in range(job.workers)]
    workers = [
        context.Process(target=_train_replica, args=(job, rank, page)) for rank, page in enumerate(pages)
    ]
    for worker in workers:
        worker.start()
    running_ranks = {worker.sentinel: rank for rank, worker in enumerate(workers)}
    send_event, lost_events, report_at_s = connect_event_sink(job.events), list[Event](), 0.0
    deliveries: list[threading.Thread] = []
    while running_ranks:
        timeout_s = max(0.0, report_at_s - time.monotonic()) if report_at_s else None
        ready = wait([*running_ranks, pipe], timeout_s)
        if pipe in ready:
            _kill(workers, job)
        if not ready:
            send_event(lost_events[0])
            report_at_s = 0.0
        for sentinel in ready:
            rank = running_ranks.pop(cast(int, sentinel))
            workers[rank].join()
            code = workers[rank].exitcode or 0
            if code and (page := pages[rank]) is not None:
                deliveries += announce_end(page, code)
            if code < 0:
                message = f"rank {rank} was ended by {signal.Signals(-code).name}"
                print(message, file=sys.stderr)
                if job.is_elastic and running_ranks:
                    send_event({"event": "lost", "rank": rank, "message": message})
                    continue
                lost_events.append(
                    _build_error_event(rank, f"{message} (see {job.files.log_path})", 1, is_own=False)
                )
                report_at_s = report_at_s or time.monotonic() + REPORT_WAIT_S
    for event in lost_events[:1]:
        send_event(event)
    for delivery in deliveries:  # members on other machines may need the certificate to continue
        while delivery.is_alive():
            delivery.join(DELIVERY_POLL_S)
            if wait([pipe], 0.0):
                _kill(workers, job)
    return 1 if lost_events else 0


def _kill(workers: Sequence[BaseProcess], job: Job) -> NoReturn:
    """Kills the workers, their child processes, and this process."""
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join()
    shutil.rmtree(job.temp_folder, ignore_errors=True)  # no worker can write any more
    os.killpg(0, signal.SIGKILL)
    raise AssertionError("this process is in the group")


def _train_replica(job: Job, rank: int, page: Page | None) -> None:
    """Trains as one replica; sends its events, and any error, to the process that started the run."""
    env = LaunchEnv(rank, job.workers, rank, job.workers, Path(job.temp_folder, "meeting"))
    code = 0
    with BufferedSink(connect_event_sink(job.events)) as sink:
        try:
            config = RunConfig.resolve(job.files.load_config())
            options = RunOptions(device=job.device, pace=job.pace, trace=job.trace)
            train_replica(PreparedRun(config, job.files, options=options), sink, env, page)
        except ReplicaLeft:
            pass
        except FarflungError as error:
            is_own = not isinstance(error, RunLost) or getattr(error, "step", None) is not None
            code = error.exit_code
            sink(_build_error_event(rank, str(error), code, is_own=is_own))
            print(f"rank {rank}: {error}", file=sys.stderr)
        except Exception as error:
            code = 1
            message = f"rank {rank} failed: {type(error).__name__}: {error} (see {job.files.log_path})"
            sink(_build_error_event(rank, message, code, is_own=True))
            traceback.print_exc()
    sys.exit(code)


def _build_error_event(rank: int, message: str, exit_code: int, *, is_own: bool) -> Event:
    """Builds an error event; ``is_own`` is False if the error is the loss of another rank."""
    return {"event": "error", "rank": rank, "message": message, "exit_code": exit_code, "is_own": is_own}


if __name__ == "__main__":
    sys.exit(serve(sys.stdin.fileno()))
