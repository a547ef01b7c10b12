"""Output of commands: results go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from farflung.files import replace_nonfinite
from farflung.report import PLAIN_WIDTH

__all__ = [
    "OutputOptions",
    "create_stderr_console",
    "create_stdout_console",
    "print_files",
    "print_json",
    "print_list",
    "print_table",
]


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Options of a command that shows its progress and prints a result."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the result as JSON on stdout and nothing else."""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show no progress."""


def create_stdout_console() -> Console:
    """Creates a console on stdout, of fixed width unless it is a terminal."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)


def create_stderr_console() -> Console:
    """Creates a console on stderr whose bar needs a real terminal, whatever the environment requests."""
    is_terminal = False
    with suppress(Exception):
        is_terminal = sys.stderr.isatty()
    return Console(
        stderr=True, force_terminal=None if is_terminal else False, force_jupyter=False, highlight=False
    )


def print_table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Prints ``lines`` of cells below column names, if any; the widest columns wrap first, and no cell is truncated."""
    rows = [[Text(cell) for cell in line] for line in lines]
    table = Table(show_header=bool(columns))
    for index, name in enumerate(columns or [""] * len(rows[0])):
        table.add_column(name, style="bold" if index == 0 else None, overflow="fold")
    for row in rows:
        table.add_row(*row)
    create_stdout_console().print(table)


def print_list(lines: Sequence[Mapping[str, str]]) -> None:
    """Prints a line of cells by column for each item, without rules; only the last column takes several lines."""
    table = Table(box=None, pad_edge=False)
    *columns, last = lines[0]
    for name in columns:
        table.add_column(name, no_wrap=True, style="bold" if name == columns[0] else None)
    table.add_column(last, overflow="fold")
    for line in lines:
        table.add_row(*(Text(cell) for cell in line.values()))
    create_stdout_console().print(table)


def print_json(value: object, indent: int | None = None) -> None:
    """Prints a value as JSON on stdout, with null in place of infinity and NaN."""
    print(json.dumps(replace_nonfinite(value), indent=indent))


def print_files(**files: Path | str) -> None:
    """Prints the name and the path of each file that a command has written."""
    for name, path in files.items():
        create_stdout_console().print(Text(f"{name:10} {path}"), soft_wrap=True)
