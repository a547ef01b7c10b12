"""Trainings that take long, stored with where their first steps end, so that they outlive changes of the code."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar, cast

from rich.console import Console

from benchmarks.common.first_steps import machine
from benchmarks.common.rows import source_hash
from farflung.errors import FarflungError

__all__ = ["TRAINED", "CannotTell", "Training", "Trainings"]

TRAINED = [
    "src/farflung/**/*.py",
    *(f"!src/farflung/{apart}/**/*.py" for apart in ("cli", "coded", "integrations", "lab", "report")),
]
"""What a training may depend on besides its settings and its own script: all but what no training goes through."""


class CannotTell(FarflungError):
    """A stored training was made on another machine, and its first steps end otherwise on this one."""


R_co = TypeVar("R_co", covariant=True)


class Training(Protocol[R_co]):
    """A frozen dataclass of settings that can be trained."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def title(self) -> str:
        """For a line of progress."""
        ...

    def first_steps(self) -> int:
        """How many say enough."""
        ...

    def digest(self, steps: int) -> str:
        """Of where the first ``steps`` of the whole training end."""
        ...

    def accuracy(self) -> R_co:
        """Trains; the test accuracy in percent, or more of what it came to, as JSON."""
        ...


T = TypeVar("T", bound=Training[Any])
R = TypeVar("R")
Where: TypeAlias = Callable[[Callable[[], Any]], Any]
"""Calls something, here or in another process, and returns its value."""


@dataclass(slots=True)
class _Line:
    """A stored training.

    Args:
      settings: of the training.
      accuracy: what it came to.
      sources: of the code that it is known to hold for.
      first_steps: how many steps were taken for the digests.
      digests: where they ended, by machine.
    """

    settings: dict[str, Any]
    accuracy: Any
    sources: str = ""
    first_steps: int = 0
    digests: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: str) -> _Line:
        known = json.loads(text)
        own = {name: known.pop(name) for name in _OWN if name in known}
        return cls(known, **own)

    def to_json(self) -> str:
        return json.dumps({**self.settings, **{name: getattr(self, name) for name in _OWN}})


_OWN = ("accuracy", "sources", "first_steps", "digests")


class Trainings(Generic[T, R]):
    """A file of JSON lines, one for each training; several processes may add to it.

    A stored training holds for the code as it is if nothing has changed since it was found to hold, or else if its
    first steps still end in the same digest. Equal digests are a proof on any machine. Unlike ones prove that the
    training has changed only where the stored digest is of the same machine; see
    :func:`benchmarks.common.first_steps.machine`.

    Args:
      path: of the file.
      kind: the dataclass of the trainings' settings.
      sources: patterns of the code that they depend on, relative to the repository.
      minutes: an estimate for the first steps of one.
    """

    def __init__(self, path: Path, kind: Callable[..., T], sources: Sequence[str], *, minutes: float) -> None:
        self.sources, self.minutes = sources, minutes
        self._path, self._kind = path, kind
        self._console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)

    def stored(self) -> list[T]:
        """All that are stored."""
        return [self._training(line) for line in self._lines()]

    def due(self) -> list[T]:
        """Those stored that are not known to hold, or whose first steps were never taken on this machine."""
        current, here = source_hash(self.sources), machine()
        return [
            self._training(line)
            for line in self._lines()
            if line.sources != current or here not in line.digests
        ]

    def accuracy(self, training: T) -> R:
        """The stored accuracy if it holds, else that of a training now.

        Raises:
          CannotTell: the stored one is of another machine.
        """
        return self._accuracy(training, lambda work: work())

    def accuracies(self, trainings: Sequence[T]) -> list[R]:
        """Of several, as many at a time as there are processors, each in a process of its own.

        Raises:
          CannotTell: a stored one is of another machine.
        """
        count = max(1, min(len(trainings), os.cpu_count() or 1))
        with (
            ProcessPoolExecutor(
                count, multiprocessing.get_context("spawn"), _end_when_interrupted
            ) as processes,
            ThreadPoolExecutor(count) as threads,
        ):

            def in_a_process(work: Callable[[], Any]) -> Any:
                return processes.submit(work).result()

            return list(threads.map(partial(self._accuracy, where=in_a_process), trainings))

    def _accuracy(self, training: T, where: Where) -> R:
        line = next((line for line in self._lines() if self._training(line) == training), None)
        current, here = source_hash(self.sources), machine()
        if line is not None and line.sources == current and here in line.digests:
            return cast("R", line.accuracy)
        steps = max(training.first_steps(), 0 if line is None else line.first_steps)
        self._console.print(f"first {steps} steps of {training.title}")
        found = where(partial(training.digest, steps))
        if line is not None and line.sources != current and not self._holds(line, steps, found):
            line = None
        if line is None:
            self._console.print(f"training {training.title}")
            line = _Line(asdict(training), where(training.accuracy))
        digests = line.digests if line.first_steps == steps else {}
        self._store(_Line(asdict(training), line.accuracy, current, steps, {**digests, here: found}))
        return cast("R", line.accuracy)

    def _holds(self, line: _Line, steps: int, found: str) -> bool:
        if line.first_steps != steps or not line.digests:
            return False
        if found in line.digests.values() or machine() in line.digests:
            return found in line.digests.values()
        raise CannotTell(
            f"{self._training(line).title}: its first {steps} steps end otherwise than on {' or '.join(line.digests)}; "
            f"this is {machine()}, so whether it holds cannot be told here: take a machine like that, store where the "
            f"code that it was trained with ends here, or remove its line from {self._path.name} to train it anew"
        )

    def _training(self, line: _Line) -> T:
        """Settings that a line does not know have their defaults."""
        return self._kind(**line.settings)

    def _lines(self) -> list[_Line]:
        if not self._path.exists():
            return []
        return [_Line.from_json(text) for text in self._path.read_text(encoding="utf-8").splitlines()]

    def _store(self, new: _Line) -> None:
        """In the place of the line with the same settings."""
        training = self._training(new)
        self._path.parent.mkdir(exist_ok=True)
        with _alone_in(self._path.parent):
            lines = self._lines()
            place = next((i for i, line in enumerate(lines) if self._training(line) == training), len(lines))
            lines[place : place + 1] = [new]
            part = self._path.with_suffix(".part")
            part.write_text("".join(line.to_json() + "\n" for line in lines), encoding="utf-8")
            part.replace(self._path)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Among the processes and threads that write there."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _end_when_interrupted() -> None:
    """Of a worker process: Ctrl-C ends it without a word; its parent says what there is to say."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
