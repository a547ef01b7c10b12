"""The workers of a run on this machine, and the process whose forks they are; see :mod:`farflung.runs.parent`.

That process gets its job as a line of JSON from a pipe that the starting process holds open. At its end nobody waits
for the run any more, and all of them end at once, however the starting process did.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import sys
import threading
import traceback
from pathlib import Path

import torch

# What a configuration imports only when it is used: here once for all workers.
import farflung.optimizers
import farflung.recipes.parts
import farflung.workloads  # noqa: F401
from farflung.errors import FarflungError, RunLost
from farflung.runs.config import RunConfig, RunOptions
from farflung.runs.events import Buffered, teller
from farflung.runs.job import Job
from farflung.runs.joining import join
from farflung.runs.preparing import Prepared
from farflung.runtime import Seat
from farflung.telemetry import Event, Sink

__all__ = ["serve"]

LATE_S = 5.0
"""How long the others have to say whom they lost before this process does."""


def serve(pipe: int) -> int:
    """Waits for the job, starts the workers, and waits for them; in each of them, trains.

    Args:
      pipe: where the job comes from.

    Returns:
      The exit code, of this process or of a worker.
    """
    torch.optim.SGD([torch.zeros(1)])  # imports what torch leaves for the first optimizer
    told = b""
    while not told.endswith(b"\n"):
        if not (more := os.read(pipe, 1 << 16)):
            return 0  # there is nothing to be done
        told += more
    job = Job.from_json(json.loads(told))
    with job.files.log.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if job.workers > 1:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    ranks: dict[int, int] = {}
    for rank in range(job.workers):
        pid = os.fork()
        if pid == 0:
            with Path(os.devnull).open("rb") as nothing:
                os.dup2(nothing.fileno(), pipe)
            return _train(job, rank)
        ranks[pid] = rank
    over = threading.Event()
    threading.Thread(target=_end_with_the_command, args=(pipe, job, ranks, over), daemon=True).start()
    code = _wait(job, ranks, over)
    if over.is_set():
        os.killpg(0, signal.SIGKILL)  # what workers may have started
    return code


def _end_with_the_command(pipe: int, job: Job, ranks: dict[int, int], over: threading.Event) -> None:
    """Kills the workers; this process ends when they are gone, so who waits for it knows that they are."""
    while os.read(pipe, 1):
        pass
    over.set()
    shutil.rmtree(job.scratch, ignore_errors=True)
    for pid in list(ranks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _wait(job: Job, ranks: dict[int, int], over: threading.Event) -> int:
    """Waits for all; tells of one that was killed, unless those that it leaves waiting do."""
    tell, lost = teller(job.events), list[Event]()
    while ranks:
        pid, status = os.wait()
        rank = ranks.pop(pid)
        if os.WIFSIGNALED(status) and not over.is_set():
            what = f"rank {rank} was ended by {signal.Signals(os.WTERMSIG(status)).name}"
            print(what, file=sys.stderr)
            lost.append(_error_event(rank, f"{what} (see {job.files.log})", 1, own=False))
            late = threading.Timer(LATE_S, tell, [lost[0]])
            late.daemon = True
            late.start()
    for event in lost[:1]:
        tell(event)
    return 1 if lost else 0


def _train(job: Job, rank: int) -> int:
    """One replica: tells the starting process of every event, and of any error."""
    with Buffered(teller(job.events)) as tell:
        return _trained(job, rank, tell)


def _trained(job: Job, rank: int, tell: Sink) -> int:
    seat = Seat(rank, job.workers, rank, job.workers, job.meeting)
    try:
        config = RunConfig.resolve(job.files.stored_config())
        run = Prepared(config, job.files, options=RunOptions(device=job.device, pace=job.pace))
        join(run, tell, seat)
    except FarflungError as error:
        own = not isinstance(error, RunLost) or getattr(error, "step", None) is not None
        tell(_error_event(rank, str(error), error.exit_code, own=own))
        print(f"rank {rank}: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        what = f"rank {rank} failed: {type(error).__name__}: {error} (see {job.files.log})"
        tell(_error_event(rank, what, 1, own=True))
        traceback.print_exc()
        return 1
    return 0


def _error_event(rank: int, message: str, exit_code: int, *, own: bool) -> Event:
    """``own``: it happened to this replica, rather than to one that it waited for."""
    return {"event": "error", "rank": rank, "message": message, "exit_code": exit_code, "own": own}


if __name__ == "__main__":
    sys.exit(serve(sys.stdin.fileno()))
