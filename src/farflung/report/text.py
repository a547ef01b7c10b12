"""Tables as plain text."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from farflung.extras import need

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["PLAIN_WIDTH", "as_text"]

PLAIN_WIDTH = 200
"""Columns of a table that does not go to a terminal."""


def as_text(table: Table) -> str:
    """The table as lines without colours, no wider than :data:`PLAIN_WIDTH`."""
    need("a table", "rich", extra="report")
    from rich.console import Console

    said = io.StringIO()
    Console(file=said, width=PLAIN_WIDTH).print(table)
    return said.getvalue().rstrip("\n")
