"""Starts workers on this machine, shows their progress, and says who was lost if one is."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from farflung.errors import BadInput, RunLost
from farflung.files import write_json, writing
from farflung.runs.config import RunConfig
from farflung.runs.events import Buffered, listener
from farflung.runs.folder import RunFolder
from farflung.runs.job import Job
from farflung.runs.parent import Parent, parent_of
from farflung.runs.preparing import Prepared
from farflung.runs.result import Run
from farflung.runs.stopping import on_stop
from farflung.telemetry import Event, Sink
from farflung.types import Json

__all__ = ["launch"]

GRACE_S = 0.1
"""How long the workers may take to end by themselves once one has reported an error."""
STOP_S = 30.0
"""How long a stop that was asked for may take."""


def launch(run: Prepared[RunConfig], show: Sink) -> Run:
    """Trains on ``config.workers`` processes; the summary is rank 0's, with ``interrupted`` after Ctrl-C.

    Args:
      run: what and where; its folder has been made.
      show: gets the events of all workers.

    Raises:
      BadInput: a worker found something wrong with what the user gave.
      RunLost: a worker was lost or failed; names it.
    """
    config, folder = run.config, run.files
    with ExitStack() as stack:
        with writing(Path(tempfile.gettempdir())):
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="farflung-"))
            events = stack.enter_context(listener(Path(scratch)))
        shown = stack.enter_context(Buffered(show))
        parent = parent_of(folder.log, workers=config.workers)
        parent.begin(
            Job(
                str(folder.path), folder.resumed, config.workers, scratch,
                device=run.options.device, pace=run.options.pace,
            )
        )  # fmt: skip
        summary = _Watch(parent, config.workers, events, shown, folder).run()
    return run.ended({**summary, "partition": config.split_json(config.split())})


class _Watch:
    """Follows the workers to their end."""

    def __init__(
        self,
        parent: Parent,
        workers: int,
        events: socket.socket,
        show: Sink,
        folder: RunFolder,
    ) -> None:
        self._parent, self._workers, self._events, self._show, self._folder = (
            parent,
            workers,
            events,
            show,
            folder,
        )
        self._pids: dict[int, int] = {}
        self._errors: list[Event] = []
        self._summary: Event | None = None
        self._interrupts = 0
        self._end_by: float | None = None

    def run(self) -> Mapping[str, Json]:
        with on_stop(self._interrupt):
            try:
                while self._parent.poll() is None:
                    self._listen()
                    if self._end_by is not None and time.monotonic() > self._end_by:
                        break
                with contextlib.suppress(BlockingIOError):
                    self._events.setblocking(False)
                    while True:
                        self._hear(self._events.recv(1 << 20))
            finally:
                self._parent.end()
        return self._outcome()

    def _listen(self) -> None:
        with contextlib.suppress(TimeoutError):
            self._hear(self._events.recv(1 << 20))

    def _hear(self, datagram: bytes) -> None:
        event: Event = json.loads(datagram)
        kind, rank = event["event"], event["rank"]
        if kind == "hello":
            self._pids[int(str(rank))] = int(str(event["pid"]))
        elif kind == "error":
            self._errors.append(event)
            self._end_by = self._end_by or time.monotonic() + GRACE_S
        elif kind == "end" and rank == 0:
            self._summary = event
        elif kind == "pace" and rank == 0 and self._summary is not None:
            self._summary = {**self._summary, "pace": {k: event[k] for k in ("device", "steps", "overran")}}
        self._show(event)

    def _interrupt(self) -> None:
        self._interrupts += 1
        at_work = len(self._pids) == self._workers
        self._end_by = time.monotonic() + (STOP_S if at_work and self._interrupts == 1 else 0.0)
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)

    def _outcome(self) -> Mapping[str, Json]:
        if self._errors:
            # A worker's own error explains more than what the others saw of it.
            told = next((e for e in self._errors if e["own"]), self._errors[0])
            kind = BadInput if told["exit_code"] == BadInput.exit_code else RunLost
            raise kind(str(told["message"]))
        if self._summary is not None:
            told = {k: v for k, v in self._summary.items() if k not in {"event", "rank", "t"}}
            kept = self._folder.stored_summary() if self._folder.summary.exists() else {}
            summary = {**kept, **told}
            if refused := self._folder.refused():
                summary["refused"] = dict(refused)
                write_json(self._folder.summary, summary)
            return {**summary, "interrupted": True} if self._interrupts else summary
        if self._interrupts:
            raise KeyboardInterrupt
        raise RunLost(
            f"the workers ended (exit code {self._parent.poll()}) and said nothing: see {self._folder.log}"
        )
