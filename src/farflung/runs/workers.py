"""Workers of a run on this machine: forks of one process that has imported torch.

That process reads its job, one line of JSON, from a pipe. When the other end of the pipe is closed, because the run was
given up or the process that started it has died, it kills the workers and ends.
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

# What a configuration imports only when it is used: here once for all workers.
import farflung.optimizers
import farflung.recipes.parts
import farflung.workloads  # noqa: F401
from farflung.errors import FarflungError, Left, RunLost
from farflung.membership import Page, certify
from farflung.runs.config import RunConfig, RunOptions
from farflung.runs.events import Buffered, teller
from farflung.runs.folder import RunFolder
from farflung.runs.joining import join
from farflung.runs.preparing import Prepared
from farflung.telemetry import Event
from farflung.wall import LaunchEnv

__all__ = ["Job", "serve"]

DELIVERY_LOOK_S = 0.1
"""How often this process looks, while certificates are delivered, whether the run was given up."""
REPORT_S = 5.0
"""Time for the surviving workers to report which rank they have lost, before this process does."""


@dataclass(frozen=True, slots=True)
class Job:
    """A run on workers of this machine.

    Args:
      folder: the run's, which exists.
      resumed: whether the run continues from a checkpoint in it.
      workers: number of them.
      scratch: a folder for the socket of events and the file of the rendezvous; removed with the run.
      device: torch's device to train on.
      pace: device profile whose speed is kept; ``None`` for full speed.
      trace: whether to tell of every exchange.
      elastic: whether the run may outlive the loss of workers.
    """

    folder: str
    resumed: bool
    workers: int
    scratch: str
    device: str
    pace: str | None
    trace: bool
    elastic: bool

    @property
    def files(self) -> RunFolder:
        """The run's folder."""
        return RunFolder(Path(self.folder), resumed=self.resumed)

    @property
    def events(self) -> str:
        """Address of the socket that takes the events."""
        return f"{self.scratch}/events"


def serve(pipe: int) -> int:
    """Reads a job, forks its workers, and waits for them.

    Args:
      pipe: descriptor from which the job comes.

    Returns:
      The exit code: 1 if a worker was killed by a signal.
    """
    torch.optim.SGD([torch.zeros(1)])  # imports what torch leaves for the first optimizer
    with open(pipe, "rb", buffering=0, closefd=False) as jobs:
        line = jobs.readline()
    if not line.endswith(b"\n"):
        return 0
    job = Job(**json.loads(line))
    with job.files.log.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if job.workers > 1:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    context = multiprocessing.get_context("fork")
    pages = [Page() if job.elastic else None for _ in range(job.workers)]
    workers = [context.Process(target=_train, args=(job, rank, page)) for rank, page in enumerate(pages)]
    for worker in workers:
        worker.start()
    running = {worker.sentinel: rank for rank, worker in enumerate(workers)}
    tell, lost, report_at = teller(job.events), list[Event](), 0.0
    deliveries: list[threading.Thread] = []
    while running:
        ended = wait([*running, pipe], max(0.0, report_at - time.monotonic()) if report_at else None)
        if pipe in ended:
            _kill(workers, job)
        if not ended:
            tell(lost[0])
            report_at = 0.0
        for sentinel in ended:
            rank = running.pop(cast(int, sentinel))
            workers[rank].join()
            code = workers[rank].exitcode or 0
            if code and (page := pages[rank]) is not None:
                deliveries += certify(page, code)
            if code < 0:
                what = f"rank {rank} was ended by {signal.Signals(-code).name}"
                print(what, file=sys.stderr)
                if job.elastic and running:
                    tell({"event": "lost", "rank": rank, "message": what})
                    continue
                lost.append(_error_event(rank, f"{what} (see {job.files.log})", 1, own=False))
                report_at = report_at or time.monotonic() + REPORT_S
    for event in lost[:1]:
        tell(event)
    for delivery in deliveries:  # members may be elsewhere that go on by it
        while delivery.is_alive():
            delivery.join(DELIVERY_LOOK_S)
            if wait([pipe], 0.0):
                _kill(workers, job)
    return 1 if lost else 0


def _kill(workers: Sequence[BaseProcess], job: Job) -> NoReturn:
    """Kills the workers, the processes that they have started, and this one."""
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join()
    shutil.rmtree(job.scratch, ignore_errors=True)  # in which no worker can write any more
    os.killpg(0, signal.SIGKILL)
    raise AssertionError("this process is in the group")


def _train(job: Job, rank: int, page: Page | None) -> None:
    """Trains as one replica; reports its events, and any error, to the process that started the run."""
    env = LaunchEnv(rank, job.workers, rank, job.workers, Path(job.scratch, "meeting"))
    code = 0
    with Buffered(teller(job.events)) as tell:
        try:
            config = RunConfig.resolve(job.files.stored_config())
            options = RunOptions(device=job.device, pace=job.pace, trace=job.trace)
            join(Prepared(config, job.files, options=options), tell, env, page)
        except Left:
            pass
        except FarflungError as error:
            own = not isinstance(error, RunLost) or getattr(error, "step", None) is not None
            code = error.exit_code
            tell(_error_event(rank, str(error), code, own=own))
            print(f"rank {rank}: {error}", file=sys.stderr)
        except Exception as error:
            code = 1
            what = f"rank {rank} failed: {type(error).__name__}: {error} (see {job.files.log})"
            tell(_error_event(rank, what, code, own=True))
            traceback.print_exc()
    sys.exit(code)


def _error_event(rank: int, message: str, exit_code: int, *, own: bool) -> Event:
    """``own``: the error is this rank's, not the loss of another."""
    return {"event": "error", "rank": rank, "message": message, "exit_code": exit_code, "own": own}


if __name__ == "__main__":
    sys.exit(serve(sys.stdin.fileno()))
