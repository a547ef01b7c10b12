"""``farflung data``: the data sets farflung can read, and how to get them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.filesize import decimal

from farflung.cli.fetch import Fetch
from farflung.cli.tables import print_rows, print_table
from farflung.data import Entry, entries
from farflung.types import Json

__all__ = ["Data", "ListData"]


@dataclass(frozen=True)
class ListData:
    """List the data sets: what they hold, whether they are at hand, and how to get them."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print them as JSON."""

    def run(self) -> int:
        """Carries it out; returns the exit code."""
        found = entries()
        if self.json:
            print_rows(_row(entry) for entry in found)
        else:
            columns = ["data set", "what", "at hand", "download", "licence", "how to get it"]
            print_table(columns, (_cells(entry) for entry in found))
        return 0


def _where(entry: Entry) -> str:
    if entry.trouble:
        return entry.trouble
    if entry.location is None:
        return "no"
    return "packaged subset" if entry.location.kind == "packaged" else f"in {entry.location.folder}"


def _row(entry: Entry) -> dict[str, Json]:
    return {
        "name": entry.source.name,
        "what": entry.source.title,
        "at_hand": entry.location is not None,
        "kind": None if entry.location is None else entry.location.kind,
        "folder": None if entry.location is None else str(entry.location.folder),
        "trouble": entry.trouble or None,
        "download_nbytes": entry.nbytes,
        "licence": entry.source.licence,
        "homepage": entry.source.homepage,
        "how_to_get": entry.source.remedy,
    }


def _cells(entry: Entry) -> list[str]:
    whole = entry.location is not None and entry.location.kind != "packaged"
    return [
        entry.source.name,
        entry.source.title,
        _where(entry),
        "?" if entry.nbytes is None else decimal(entry.nbytes),
        entry.source.licence,
        "" if whole else entry.source.remedy,
    ]


@dataclass(frozen=True)
class Data:
    """List the data sets, or fetch one."""

    what: (
        Annotated[ListData, tyro.conf.subcommand("list", prefix_name=False)]
        | Annotated[Fetch, tyro.conf.subcommand("fetch", prefix_name=False)]
    )

    def run(self) -> int:
        """Carries it out; returns the exit code."""
        return self.what.run()
