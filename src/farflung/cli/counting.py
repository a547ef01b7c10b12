"""How far a row of runs has come, on stderr while it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from farflung.cli.progress import clock_text, stderr_console
from farflung.telemetry import Event

__all__ = ["Counting"]


class Counting:
    """A sink that counts the steps of several runs: a bar in a terminal, else a line for each run that is through.

    The time left is taken from the steps that were simulated here; those of runs that were there already cost nothing.

    Args:
      steps: of all runs together.
      runs: how many.
      quiet: shows nothing at all.
      console: where to; stderr when not given.
      clock: seconds for whoever watches.
    """

    def __init__(
        self,
        steps: int,
        runs: int,
        *,
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps, self._runs, self._quiet, self._clock = steps, runs, quiet, clock
        self._console = console if console is not None else stderr_console()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._bar = Progress(*columns, console=self._console, transient=True, redirect_stdout=False)
        self._task = self._bar.add_task("", total=steps, left="")
        self._begun = clock()
        self._number, self._name, self._of_this = 0, "", 0
        self._passed = self._simulated = self._here = 0

    def begin(self, name: str, steps: int) -> None:
        """A run of ``steps`` steps begins, or is there already."""
        self._number += 1
        self._name, self._of_this, self._here = name, steps, 0
        self._show()

    def __call__(self, event: Event) -> None:
        """Takes in one event of the run."""
        if event["event"] == "step" and event["rank"] == 0:
            self._here += 1
            self._simulated += 1
            self._show()

    def end(self) -> None:
        """The run is through."""
        self._passed += self._of_this
        self._here = 0
        self._show()
        if not self._quiet and not self._console.is_terminal:
            words = f"run {self._number} of {self._runs}: {self._name}"
            left = self._left()
            with suppress(Exception):
                self._console.print(Text(f"{words}; {left}" if left else words), soft_wrap=True)

    def _left(self) -> str:
        """How long the rest will take, in words; empty where nothing can be said."""
        rest = self._steps - self._passed - self._here
        if not self._simulated or not rest:
            return ""
        return f"about {clock_text((self._clock() - self._begun) / self._simulated * rest)} left"

    def _show(self) -> None:
        with suppress(Exception):
            self._bar.update(
                self._task,
                completed=self._passed + self._here,
                description=f"{self._number} of {self._runs}  {self._name}",
                left=self._left(),
            )

    def __enter__(self) -> Self:
        if not self._quiet and self._console.is_terminal:
            with suppress(Exception):
                self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar.live.is_started:
            with suppress(Exception):
                self._bar.stop()
