"""Trainings that take long, stored with the commit that made them and trained again once a canary has changed."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar, cast

from rich.console import Console

from benchmarks.common.provenance import changed_canaries, commit_here, machine, today
from benchmarks.common.results import write_lines

__all__ = ["Line", "Training", "Trainings"]

R_co = TypeVar("R_co", covariant=True)


class Training(Protocol[R_co]):
    """A frozen dataclass of settings that can be trained."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def title(self) -> str:
        """For a line of progress."""
        ...

    def train(self) -> R_co:
        """The curve that the training comes to, as JSON: evaluations by step, or one at its end."""
        ...


T = TypeVar("T", bound=Training[Any])
R = TypeVar("R")
Where: TypeAlias = Callable[[Callable[[], Any]], Any]
"""Calls a function, here or in another process, and returns its value."""


@dataclass(frozen=True)
class Line:
    """A stored training.

    Args:
      settings: of the training; those that are missing have their defaults.
      curve: what it came to.
      commit: the last one that had changed the code when it was trained.
      date: of the training.
      machine: processor, cores, versions of torch and Python.
      seconds: that it took.
      stored_by_commit: whether the commit is the one that stored it, which may be later than its code.
    """

    settings: Mapping[str, Any]
    curve: Any
    commit: str
    date: str
    machine: Mapping[str, Any]
    seconds: float | None = None
    stored_by_commit: bool = False


class Trainings(Generic[T, R]):
    """A file of JSON lines, one for each training; several processes may add to it.

    A stored training is used whatever its commit, until one of its canaries has changed since.

    Args:
      path: of the file.
      kind: the dataclass of the trainings' settings.
      battery: names of the cases of ``tests/battery`` that cover a training.
      used: those of another file, where rows are of both.
    """

    def __init__(
        self,
        path: Path,
        kind: Callable[..., T],
        battery: Callable[[T], Sequence[str]],
        used: list[Line] | None = None,
    ) -> None:
        self._path, self._kind, self._battery = path, kind, battery
        self._console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self.used: list[Line] = [] if used is None else used
        """Lines whose curves have been asked for."""

    def stored(self) -> list[T]:
        """The settings of all that are stored."""
        return [self._training(line) for line in self._lines()]

    def due(self) -> list[T]:
        """The settings of those whose canaries have changed."""
        return [self._training(line) for line in self._lines() if self._changed(line)]

    def curve(self, training: T) -> R:
        """The stored curve, or that of a training now where there is none or a canary has changed.

        Raises:
          NotCommitted: it would have to be trained with code that is in no commit.
        """
        return self._curve(training, lambda work: work())

    def curves(self, trainings: Sequence[T]) -> list[R]:
        """Those of several, trained as many at a time as there are processors, each in a process of its own."""
        count = max(1, min(len(trainings), os.cpu_count() or 1))
        with (
            ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _end_with_parent) as processes,
            ThreadPoolExecutor(count) as threads,
        ):

            def in_a_process(work: Callable[[], Any]) -> Any:
                return processes.submit(work).result()

            return list(threads.map(partial(self._curve, where=in_a_process), trainings))

    def _curve(self, training: T, where: Where) -> R:
        line = next((line for line in self._lines() if self._training(line) == training), None)
        if line is None or self._changed(line):
            commit, began = commit_here(), time.monotonic()
            self._console.print(f"training {training.title}")
            curve = where(training.train)
            seconds = round(time.monotonic() - began, 1)
            line = Line(asdict(training), curve, commit, today(), machine(), seconds)
            self._store(line)
        self.used.append(line)
        return cast("R", line.curve)

    def _changed(self, line: Line) -> bool:
        return bool(changed_canaries(self._battery(self._training(line)), line.commit, times=False))

    def _training(self, line: Line) -> T:
        return self._kind(**line.settings)

    def _lines(self) -> list[Line]:
        if not self._path.exists():
            return []
        return [Line(**json.loads(text)) for text in self._path.read_text(encoding="utf-8").splitlines()]

    def _store(self, new: Line) -> None:
        """In the place of the line with the same settings."""
        training = self._training(new)
        self._path.parent.mkdir(exist_ok=True)
        with _alone_in(self._path.parent):
            lines = self._lines()
            place = next((i for i, line in enumerate(lines) if self._training(line) == training), len(lines))
            lines[place : place + 1] = [new]
            write_lines(self._path, [asdict(line) for line in lines])


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Among the processes and threads that write there."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _end_with_parent() -> None:
    """Ends a worker process at Ctrl-C, which its parent reports, and where the parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
