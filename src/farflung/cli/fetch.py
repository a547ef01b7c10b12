"""``farflung data fetch``: downloads a data set into the cache, verified."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from farflung.data import fetch, get_cache_folder, lookup_source
from farflung.errors import DataError

__all__ = ["Data"]


@dataclass(frozen=True)
class Data:
    """Fetch a data set into the cache: farflung data fetch NAME.

    A file gets its name when it is whole and has the published checksum.
    """

    action: tyro.conf.Positional[Literal["fetch"]]
    """Action to perform."""
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """Data set to fetch; see farflung list data. Also module:name, for a farflung.data.Source."""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show no progress."""

    def run(self) -> int:
        source = lookup_source(self.name)
        try:
            folder = fetch(source, progress=sys.stderr.isatty() and not self.quiet)
        except OSError as error:
            raise DataError(f"{self.name}: cannot write to {get_cache_folder()} ({error.strerror})") from None
        print(folder)
        return 0
