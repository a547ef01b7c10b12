"""``farflung data fetch``: downloads a data set into the cache, verified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from rich.filesize import decimal

from farflung.cli.progress import Bar
from farflung.data import cache_folder, fetch, source_named
from farflung.errors import DataError

__all__ = ["Data"]


@dataclass(frozen=True)
class Data:
    """Fetch one data set into the cache: farflung data fetch NAME.

    Files are verified against known checksums before they get their name; an interrupted download goes on where it
    stopped when the command is given again.
    """

    what: tyro.conf.Positional[Literal["fetch"]]
    """What to do."""
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """Which data set; see farflung list data."""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show no progress."""

    def run(self) -> int:
        """Carries it out; returns the exit code."""
        source = source_named(self.name)
        bar = Bar("connecting", quiet=self.quiet, unit=lambda nbytes: decimal(int(nbytes)))

        def told(name: str, have: int, expected: int | None) -> None:
            if bar.state != name:
                bar.start(name, 0.0, have)
                bar.line(f"fetching {name}")
            bar.total = expected or 0
            bar.advance(have)

        try:
            with bar:
                folder = fetch(source, progress=told)
        except OSError as error:
            raise DataError(f"{self.name}: cannot write to {cache_folder()} ({error.strerror})") from None
        print(folder)
        return 0
