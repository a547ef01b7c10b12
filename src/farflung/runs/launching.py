"""Starts the workers of a run on this machine, and follows their events to the end.

Workers are forks of a process that has imported torch (:mod:`farflung.runs.workers`). The ``farflung`` command forks
that process off itself before it computes anything, so that nothing is imported twice. A program that calls
:func:`farflung.train` may have computed and may have threads, and neither survives a fork; there it is a Python of its
own. It is not the fork server of :mod:`multiprocessing`, which imports the main module in each worker: a script
without an ``if __name__`` guard, or one read from stdin, would fail.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from farflung.errors import BadInput, RunLost
from farflung.files import write_json, writing
from farflung.runs.bottleneck import slowest
from farflung.runs.config import RunConfig
from farflung.runs.events import Buffered, listener
from farflung.runs.folder import RunFolder
from farflung.runs.preparing import Prepared
from farflung.runs.result import Run
from farflung.runs.stopping import on_stop
from farflung.runs.workers import Job, serve
from farflung.telemetry import Event, Sink, count_refusals
from farflung.types import Json

__all__ = ["forked_ahead", "launch"]

GRACE_S = 0.1
"""Time for workers to end by themselves once one has reported an error."""
END_S = 5.0
"""Time for the parent of the workers to end them, before it is killed with them."""


@dataclass(frozen=True, slots=True)
class Parent:
    """The process whose forks are the workers, in a session of its own.

    Args:
      pid: its process id, and that of its group.
      pipe: write end of the pipe from which it reads its job; closing it ends the workers and the process.
      poll: returns its exit code; ``None`` while it runs.
      wait: waits for its end, for at most so many seconds.
    """

    pid: int
    pipe: int
    poll: Callable[[], int | None]
    wait: Callable[[float], object]

    def end(self) -> None:
        """Ends the process and its workers, and waits until all have ended."""
        os.close(self.pipe)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(END_S)
        if self.poll() is None:  # it hangs, and so do perhaps its workers
            for end in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):  # not yet in a session of its own
                    end(self.pid, signal.SIGKILL)
            self.wait(END_S)


_ahead: list[Parent] = []
"""The parent that was forked ahead and has no job yet."""


@contextmanager
def forked_ahead() -> Iterator[None]:
    """Forks the parent of the workers of one run here; the caller has computed nothing and has no threads yet."""
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
    os.setsid()
    os.close(ours)
    sys.exit(serve(theirs))


def parent_of(log: Path, *, workers: int) -> Parent:
    """Returns the parent that was forked ahead, or starts one.

    Args:
      log: file of its output until it has its job.
      workers: number of its workers; several have one thread each.

    Raises:
      BadInput: ``log`` cannot be written.
    """
    if _ahead:
        return _ahead.pop()
    # Workers import what is named from where this process would.
    path = os.pathsep.join(dict.fromkeys(path or str(Path.cwd()) for path in sys.path))
    threads = {"OMP_NUM_THREADS": "1"} if workers > 1 else {}
    theirs, ours = os.pipe()
    with os.fdopen(theirs), writing(log), log.open("ab") as output:
        started = subprocess.Popen(
            [sys.executable, "-m", "farflung.runs.workers"],
            stdin=theirs,
            stdout=output,
            stderr=output,
            env={**os.environ, **threads, "PYTHONPATH": path},
            start_new_session=True,
        )
    return Parent(started.pid, ours, started.poll, started.wait)


def launch(run: Prepared[RunConfig], show: Sink) -> Run:
    """Trains on ``config.workers`` processes; the summary is the lowest rank's, with ``interrupted`` after Ctrl-C.

    Args:
      run: configuration, options and folder, which exists.
      show: takes the events of all workers.

    Raises:
      BadInput: a worker found an error in what the user gave.
      RunLost: a worker was lost or failed; names it.
    """
    config, folder = run.config, run.files
    with ExitStack() as stack:
        with writing(Path(tempfile.gettempdir())):
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="farflung-"))
            events = stack.enter_context(listener(Path(scratch)))
        shown = stack.enter_context(Buffered(show))
        parent = parent_of(folder.log, workers=config.workers)
        options, elastic = run.options, bool(config.elastic)
        job = Job(
            str(folder.path),
            folder.resumed,
            config.workers,
            scratch,
            options.device,
            options.pace,
            options.trace,
            elastic,
        )
        with contextlib.suppress(BrokenPipeError):  # it has ended
            os.write(parent.pipe, json.dumps(asdict(job)).encode() + b"\n")
        watch = _Watch(parent, config.workers, events, shown, folder, config.deadline, elastic)
        summary = watch.run()
    return run.ended({**summary, "partition": config.split_json()})


@dataclass
class _Watch:
    """Follows the workers to their end.

    Once a stop is asked for, it ends workers that have told nothing for the run's deadline: they have ended no step,
    and a step may take longer than all before it, but not twice as long as the longest.
    """

    parent: Parent
    workers: int
    events: socket.socket
    show: Sink
    folder: RunFolder
    deadline_s: float
    elastic: bool

    def __post_init__(self) -> None:
        self._pids: dict[int, int] = {}
        self._errors: list[Event] = []
        self._told: dict[str, dict[int, Event]] = {"end": {}, "pace": {}}
        """The events of these kinds, by rank."""
        self._interrupts, self._longest_s = 0, 0.0
        """The signals to stop, and the longest step."""
        self._end_by = self._stop_by = math.inf
        """When workers are ended that an error or a second interrupt ends, and those that a stop waits for."""

    def run(self) -> Mapping[str, Json]:
        with on_stop(self._interrupt):
            try:
                while self.parent.poll() is None:
                    with contextlib.suppress(TimeoutError):
                        self._hear(self.events.recv(1 << 20))
                    if time.monotonic() > min(self._end_by, self._stop_by):
                        break
                with contextlib.suppress(BlockingIOError):
                    self.events.setblocking(False)
                    while True:
                        self._hear(self.events.recv(1 << 20))
            finally:
                self.parent.end()
        return self._outcome()

    def _hear(self, datagram: bytes) -> None:
        event: Event = json.loads(datagram)
        kind, rank = event["event"], event["rank"]
        if kind == "hello":
            self._pids[int(str(rank))] = int(str(event["pid"]))
        elif kind == "error":
            self._errors.append(event)
            if not self.elastic or event["exit_code"] == BadInput.exit_code:
                self._end_by = min(self._end_by, time.monotonic() + GRACE_S)
        elif kind == "step":
            self._longest_s = max(self._longest_s, float(str(event["duration_s"])))
            if self._interrupts:
                self._stop_by = time.monotonic() + self._patience_s
        elif kind in self._told:
            self._told[str(kind)][int(str(rank))] = event
        self.show(event)

    @property
    def _patience_s(self) -> float:
        """For how long a stop may go on while no step ends."""
        return max(self.deadline_s, 2 * self._longest_s)

    def _interrupt(self) -> None:
        self._interrupts += 1
        at_work = len(self._pids) == self.workers
        if at_work and self._interrupts == 1:
            self._stop_by = time.monotonic() + self._patience_s
        else:
            self._end_by = time.monotonic()
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)

    def _outcome(self) -> Mapping[str, Json]:
        ends, paces = self._told.values()
        if self._errors and not (self.elastic and ends):
            # A worker's own error explains more than what the others saw of it.
            told = next((e for e in self._errors if e["own"]), self._errors[0])
            kind = BadInput if told["exit_code"] == BadInput.exit_code else RunLost
            raise kind(str(told["message"]))
        if ends:
            rank = min(ends)
            told = {k: v for k, v in ends[rank].items() if k not in {"event", "rank", "t"}}
            if rank in paces:
                told["pace"] = {k: paces[rank][k] for k in ("device", "steps", "overran")}
            kept = self.folder.stored_summary() if self.folder.summary.exists() else {}
            events = self.folder.events()
            found: dict[str, Json] = {
                "refused": {**count_refusals(chain(*events.values()))},
                "slowest": slowest(events),
            }
            summary = {**kept, **told, **{name: value for name, value in found.items() if value}}
            if any(found.values()):
                write_json(self.folder.summary, summary)
            return {**summary, "interrupted": True} if self._interrupts else summary
        if self._interrupts:
            raise KeyboardInterrupt
        raise RunLost(
            f"the workers ended (exit code {self.parent.poll()}) and said nothing: see {self.folder.log}"
        )
