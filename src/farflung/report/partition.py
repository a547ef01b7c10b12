"""Table of the sizes and labels of each replica's share of the training set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from farflung.data import Share
from farflung.report.tables import create_table

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["render_partition_table"]

MAX_ROWS = 20
"""Number of replicas above which the table shows the first few and counts the others."""
MAX_COLUMNS = 10
"""Number of labels above which the table names the most common ones of each replica."""


def render_partition_table(shares: Sequence[Share], split_text: str) -> Table:
    """Renders size and labels of each replica's share as a table; the last row sums up ranks above the limit.

    Args:
      shares: Shares in the order of ranks.
      split_text: Requested split, as text.

    Raises:
      MissingExtra: rich is not installed.
    """
    total = sum(share.size for share in shares)
    labels = len(shares[0].histogram)
    few = 0 < labels <= MAX_COLUMNS
    suffix = ", of each label" if few else ""
    title = f"{split_text}: {total:,} training samples on {len(shares):,} replicas{suffix}"
    table = create_table(title, box=None, padding=(0, 1, 0, 0), min_width=len(title))
    table.add_column("replica", justify="right")
    table.add_column("samples", justify="right")
    if few:
        for label in range(labels):
            table.add_column(str(label), justify="right")
    elif labels:
        table.add_column("labels", justify="right")
        table.add_column("most of")
    shown = shares if len(shares) <= MAX_ROWS else shares[: MAX_ROWS - 1]
    for rank, share in enumerate(shown):
        words = (
            [f"{count:,}" if count else "·" for count in share.histogram] if few else _format_labels(share)
        )
        table.add_row(str(rank), f"{share.size:,}", *words)
    if len(shown) < len(shares):
        sizes = [share.size for share in shares[len(shown) :]]
        table.add_row(f"{len(sizes):,} more", f"{min(sizes):,} to {max(sizes):,}")
    return table


def _format_labels(share: Share) -> list[str]:
    """Formats the number of labels, and the three most common with their fraction; [] without labels."""
    counts = sorted(((count, label) for label, count in enumerate(share.histogram) if count), reverse=True)
    if not share.histogram:
        return []
    words = ", ".join(f"{label} ({100 * count / share.size:.0f} %)" for count, label in counts[:3])
    return [str(len(counts)), words]
