"""Launch and supervision of a run's workers on this machine.

Workers are forks of a parent process that has imported torch (:mod:`farflung.runs.workers`). The ``farflung`` command
forks the parent before it computes anything, so modules are imported once. A program that calls :func:`farflung.train`
may have threads, which do not survive a fork, so there the parent is a new Python process. The fork server of
:mod:`multiprocessing` is not used, since it imports the main module in each worker. That fails for scripts without an
``if __name__`` guard or read from stdin.
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
from farflung.files import wrap_write_errors, write_json
from farflung.runs.bottleneck import find_bottleneck
from farflung.runs.config import RunConfig
from farflung.runs.events import BufferedSink, listen_for_events
from farflung.runs.folder import RunFolder
from farflung.runs.preparing import PreparedRun
from farflung.runs.result import Run
from farflung.runs.stopping import handle_stop_signals
from farflung.runs.workers import Job, serve
from farflung.telemetry import Event, Sink, count_refusals
from farflung.types import Json

__all__ = ["fork_worker_parent", "launch"]

GRACE_S = 0.1
"""Seconds for workers to end by themselves after one reported an error."""
END_S = 5.0
"""Seconds for the parent to end its workers before all are killed."""


@dataclass(frozen=True, slots=True)
class WorkerParent:
    """Parent process of the workers, in a separate session.

    Args:
      pid: Id of the process and its group.
      pipe: Write end of the pipe from which it reads its job; closing it ends the workers and the process.
      poll: Function that returns the exit code, or ``None`` while the process runs.
      wait: Function that waits for the end with a timeout in seconds.
    """

    pid: int
    pipe: int
    poll: Callable[[], int | None]
    wait: Callable[[float], object]

    def stop(self) -> None:
        """Ends the process and its workers, and waits until all have ended."""
        os.close(self.pipe)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(END_S)
        if self.poll() is None:  # it hangs, and its workers may hang too
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):  # the session may not exist yet
                    kill(self.pid, signal.SIGKILL)
            self.wait(END_S)


_forked_parents: list[WorkerParent] = []
"""Parent that was forked in advance and has no job yet; at most one."""


@contextmanager
def fork_worker_parent() -> Iterator[None]:
    """Forks the parent of one run's workers; the caller must not have threads or have computed anything."""
    read_fd, write_fd = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=_serve_in_fork, args=(read_fd, write_fd))
    process.start()
    os.close(read_fd)
    assert process.pid is not None
    _forked_parents.append(WorkerParent(process.pid, write_fd, lambda: process.exitcode, process.join))
    try:
        yield
    finally:
        if _forked_parents:
            _forked_parents.pop().stop()


def _serve_in_fork(read_fd: int, write_fd: int) -> None:
    """Runs :func:`farflung.runs.workers.serve` on the pipe's read end in a session of its own, and exits with its
    code.
    """
    os.setsid()
    os.close(write_fd)
    sys.exit(serve(read_fd))


def obtain_parent(log: Path, *, workers: int) -> WorkerParent:
    """Returns the parent that was forked in advance, or starts one.

    Args:
      log: File for its output until it has its job.
      workers: Number of its workers; if there are several, each has one thread.

    Raises:
      BadInput: ``log`` cannot be written.
    """
    if _forked_parents:
        return _forked_parents.pop()
    # Workers search modules in the same places as this process.
    path = os.pathsep.join(dict.fromkeys(path or str(Path.cwd()) for path in sys.path))
    threads = {"OMP_NUM_THREADS": "1"} if workers > 1 else {}
    read_fd, write_fd = os.pipe()
    with os.fdopen(read_fd), wrap_write_errors(log), log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "farflung.runs.workers"],
            stdin=read_fd,
            stdout=output,
            stderr=output,
            env={**os.environ, **threads, "PYTHONPATH": path},
            start_new_session=True,
        )
    return WorkerParent(process.pid, write_fd, process.poll, process.wait)


def launch(run: PreparedRun[RunConfig], sink: Sink) -> Run:
    """Trains on ``config.workers`` processes; the summary is the lowest rank's, with ``interrupted`` after Ctrl-C.

    Args:
      run: Prepared run, whose folder exists.
      sink: Sink for the events of all workers.

    Raises:
      BadInput: A worker found an error in the user's input.
      RunLost: A worker was lost or failed; the message names it.
    """
    config, folder = run.config, run.files
    with ExitStack() as stack:
        with wrap_write_errors(Path(tempfile.gettempdir())):
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="farflung-"))
            events = stack.enter_context(listen_for_events(Path(scratch)))
        buffered_sink = stack.enter_context(BufferedSink(sink))
        parent = obtain_parent(folder.log_path, workers=config.workers)
        options, elastic = run.options, bool(config.elastic)
        job = Job(
            str(folder.path),
            folder.is_resumed,
            config.workers,
            scratch,
            options.device,
            options.pace,
            options.trace,
            elastic,
        )
        with contextlib.suppress(BrokenPipeError):  # it has ended
            os.write(parent.pipe, json.dumps(asdict(job)).encode() + b"\n")
        monitor = _WorkerMonitor(
            parent, config.workers, events, buffered_sink, folder, config.deadline, elastic
        )
        summary = monitor.run()
    return run.build_result({**summary, "partition": config.describe_partition()})


@dataclass
class _WorkerMonitor:
    """Monitor of the workers until their end.

    After a stop request, it ends workers that complete no step within the run's deadline or twice the longest step.
    """

    parent: WorkerParent
    workers: int
    events: socket.socket
    sink: Sink
    folder: RunFolder
    deadline_s: float
    is_elastic: bool

    def __post_init__(self) -> None:
        self._pids: dict[int, int] = {}
        self._errors: list[Event] = []
        self._final_events: dict[str, dict[int, Event]] = {"end": {}, "pace": {}}
        """Last event of these kinds, by rank."""
        self._num_interrupts, self._longest_step_s = 0, 0.0
        """Number of stop signals, and duration of the longest step."""
        self._kill_deadline_s = self._stop_deadline_s = math.inf
        """Times at which workers are ended: after an error or second interrupt, and after a stop request."""

    def run(self) -> Mapping[str, Json]:
        """Forwards events until the workers have ended; returns the summary."""
        with handle_stop_signals(self._handle_interrupt):
            try:
                while self.parent.poll() is None:
                    with contextlib.suppress(TimeoutError):
                        self._handle_datagram(self.events.recv(1 << 20))
                    if time.monotonic() > min(self._kill_deadline_s, self._stop_deadline_s):
                        break
                with contextlib.suppress(BlockingIOError):
                    self.events.setblocking(False)
                    while True:
                        self._handle_datagram(self.events.recv(1 << 20))
            finally:
                self.parent.stop()
        return self._build_summary()

    def _handle_datagram(self, datagram: bytes) -> None:
        event: Event = json.loads(datagram)
        kind, rank = event["event"], event["rank"]
        if kind == "hello":
            self._pids[int(str(rank))] = int(str(event["pid"]))
        elif kind == "error":
            self._errors.append(event)
            if not self.is_elastic or event["exit_code"] == BadInput.exit_code:
                self._kill_deadline_s = min(self._kill_deadline_s, time.monotonic() + GRACE_S)
        elif kind == "step":
            self._longest_step_s = max(self._longest_step_s, float(str(event["duration_s"])))
            if self._num_interrupts:
                self._stop_deadline_s = time.monotonic() + self._patience_s
        elif kind in self._final_events:
            self._final_events[str(kind)][int(str(rank))] = event
        self.sink(event)

    @property
    def _patience_s(self) -> float:
        """Largest number of seconds without a completed step after a stop request."""
        return max(self.deadline_s, 2 * self._longest_step_s)

    def _handle_interrupt(self) -> None:
        self._num_interrupts += 1
        have_all_started = len(self._pids) == self.workers
        if have_all_started and self._num_interrupts == 1:
            self._stop_deadline_s = time.monotonic() + self._patience_s
        else:
            self._kill_deadline_s = time.monotonic()
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)

    def _build_summary(self) -> Mapping[str, Json]:
        ends, paces = self._final_events.values()
        if self._errors and not (self.is_elastic and ends):
            # A worker's own error is more specific than those of its peers.
            error = next((e for e in self._errors if e["is_own"]), self._errors[0])
            kind = BadInput if error["exit_code"] == BadInput.exit_code else RunLost
            raise kind(str(error["message"]))
        if ends:
            rank = min(ends)
            final_summary = {k: v for k, v in ends[rank].items() if k not in {"event", "rank", "t"}}
            if rank in paces:
                final_summary["pace"] = {k: paces[rank][k] for k in ("device", "steps", "num_overruns")}
            stored_summary = self.folder.load_summary() if self.folder.summary_path.exists() else {}
            events = self.folder.load_events()
            derived: dict[str, Json] = {
                "refused": {**count_refusals(chain(*events.values()))},
                "bottleneck": find_bottleneck(events),
            }
            summary = {
                **stored_summary,
                **final_summary,
                **{name: value for name, value in derived.items() if value},
            }
            if any(derived.values()):
                write_json(self.folder.summary_path, summary)
            return {**summary, "interrupted": True} if self._num_interrupts else summary
        if self._num_interrupts:
            raise KeyboardInterrupt
        raise RunLost(
            f"the workers ended (exit code {self.parent.poll()}) and said nothing: see {self.folder.log_path}"
        )
