"""``farflung data fetch``: downloads a data set into the cache, verified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as Speed

from farflung.data import cache_folder, fetch, source_named
from farflung.errors import DataError

__all__ = ["Fetch"]


@dataclass(frozen=True)
class Fetch:
    """Fetch one data set into the cache.

    Files are verified against known checksums before they get their name; an interrupted download goes on where it
    stopped when the command is given again.
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """Which; farflung data list names them."""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show no progress."""

    def run(self) -> int:
        """Carries it out; returns the exit code."""
        source = source_named(self.name)
        try:
            with _Bars(quiet=self.quiet) as bars:
                folder = fetch(source, progress=bars)
        except OSError as error:
            raise DataError(f"{self.name}: cannot write to {cache_folder()} ({error.strerror})") from None
        print(folder)
        return 0


class _Bars:
    """A bar for each file in a terminal, a line for each elsewhere."""

    def __init__(self, *, quiet: bool) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            Speed(),
            TimeRemainingColumn(),
        )
        self._bars = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Bars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def __call__(self, name: str, have: int, expected: int | None) -> None:
        """Takes in how far a file is."""
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name)
            if not self._console.is_terminal:
                self._console.print(f"fetching {name}", soft_wrap=True)
        self._bars.update(self._tasks[name], completed=have, total=expected)
