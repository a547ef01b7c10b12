"""How far a row of short pieces of work has come, on stderr while it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from farflung.cli.progress import clock_text, stderr_console

__all__ = ["Pieces"]


class Pieces:
    """A bar in a terminal, with the time left; elsewhere one line at the beginning.

    It draws when a piece begins and has no thread, so that nothing runs beside what is measured.

    Args:
      count: of the pieces.
      console: where to; stderr when not given.
      clock: seconds for whoever watches.
    """

    def __init__(
        self, count: int, *, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._count, self._clock = count, clock
        self._console = console if console is not None else stderr_console()
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"))
        self._bar = Progress(*columns, console=self._console, transient=True, auto_refresh=False)
        self._task = self._bar.add_task("", total=count, left="")
        self._begun, self._number = clock(), 0

    def begin(self, name: str) -> None:
        """The next piece begins."""
        rest = self._count - self._number
        left = (self._clock() - self._begun) / self._number * rest if self._number else 0.0
        with suppress(Exception):
            self._bar.update(
                self._task,
                completed=self._number,
                description=f"{self._number + 1} of {self._count}  {name}",
                left=f"about {clock_text(left)} left" if left else "",
                refresh=self._bar.live.is_started,
            )
        self._number += 1

    def __enter__(self) -> Self:
        with suppress(Exception):
            if self._console.is_terminal:
                self._bar.start()
            else:
                self._console.print(
                    Text(f"measures {self._count} things, one after the other"), soft_wrap=True
                )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(Exception):
            if self._bar.live.is_started:
                self._bar.stop()
