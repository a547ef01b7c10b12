"""What the listing commands share: a table for people, JSON for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from farflung.types import Json

__all__ = ["print_rows", "print_table"]

PLAIN_WIDTH = 200
"""Columns of a table that does not go to a terminal."""


def print_rows(rows: Iterable[dict[str, Json]]) -> None:
    """Prints one JSON list of ``rows``."""
    print(json.dumps(list(rows), indent=2))


def print_table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Prints ``lines`` of cells below the names of their columns; the first column is never wrapped."""
    table = Table()
    for place, name in enumerate(columns):
        table.add_column(name, no_wrap=place == 0, style="bold" if place == 0 else None)
    for line in lines:
        table.add_row(*(Text(cell) for cell in line))
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else PLAIN_WIDTH).print(table)
