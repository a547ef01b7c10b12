"""The process whose forks the workers of a run are, as whoever starts it sees it.

Torch takes seconds to import. The ``farflung`` command forks this process off itself before it computes anything, so
nothing is imported twice. A program that calls :func:`farflung.train` may have computed, and have threads, neither of
which goes together with a fork; there it is a Python of its own.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from farflung.files import writing
from farflung.runs.job import Job

__all__ = ["Parent", "forked_ahead", "parent_of"]


END_S = 5.0
"""How long it has to end its workers before it is killed with them."""


@dataclass(frozen=True, slots=True)
class Parent:
    """A process in a session of its own; when ``pipe`` is closed it ends the workers, and then itself.

    Args:
      pid: its process id, and that of its group.
      pipe: the end of a pipe at whose other end it waits for its job.
      poll: its exit code, once it has ended.
      wait: waits until it has, for so many seconds at most.
    """

    pid: int
    pipe: int
    poll: Callable[[], int | None]
    wait: Callable[[float], object]

    def begin(self, job: Job) -> None:
        """Gives it its job; one that has ended already takes none."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.pipe, json.dumps(job.to_json()).encode() + b"\n")

    def end(self) -> None:
        """Ends it and its workers, if they have not ended, and waits until all have."""
        os.close(self.pipe)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(END_S)
        if self.poll() is None:  # it stands still, and so do perhaps its workers
            for end in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):  # not yet in a session of its own
                    end(self.pid, signal.SIGKILL)
            self.wait(END_S)


_ahead: list[Parent] = []
"""The process that was forked ahead and has no job yet."""


@contextmanager
def forked_ahead() -> Iterator[None]:
    """Inside, the workers of one run are forks of a process that is forked off here, once nothing has been computed and
    no thread started.
    """
    theirs, ours = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=_forked, args=(theirs, ours))
    process.start()
    os.close(theirs)
    assert process.pid is not None
    _ahead.append(Parent(process.pid, ours, lambda: process.exitcode, process.join))
    try:
        yield
    finally:
        if _ahead:
            _ahead.pop().end()


def _forked(theirs: int, ours: int) -> None:
    from farflung.runs import workers  # which is no part of this package while it runs by itself

    os.setsid()
    os.close(ours)
    sys.exit(workers.serve(theirs))


def parent_of(log: Path, *, workers: int) -> Parent:
    """Returns the process that was forked ahead, or starts one.

    Args:
      log: where it writes what it has to say before it knows its job.
      workers: number of its workers; several share the cores, with one thread each.

    Raises:
      BadInput: ``log`` cannot be written.
    """
    if _ahead:
        return _ahead.pop()
    theirs, ours = os.pipe()
    with os.fdopen(theirs), writing(log), log.open("ab") as said:
        started = subprocess.Popen(
            [sys.executable, "-m", "farflung.runs.workers"],
            stdin=theirs,
            stdout=said,
            stderr=said,
            env=_environment(workers),
            start_new_session=True,
        )
    return Parent(started.pid, ours, started.poll, started.wait)


def _environment(workers: int) -> dict[str, str]:
    # Workers import what was named from where this process would.
    found = os.pathsep.join(dict.fromkeys(path or str(Path.cwd()) for path in sys.path))
    threads = {"OMP_NUM_THREADS": "1"} if workers > 1 else {}
    return {**os.environ, **threads, "PYTHONPATH": found}
