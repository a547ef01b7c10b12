"""How a training set is split among replicas: a table and a picture of sizes and labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from farflung.data import Share
from farflung.report.pictures import BLUE, name_rows, picture, ticks
from farflung.report.tables import new_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

__all__ = ["partition_picture", "partition_table"]

MOST_ROWS = 20
"""With more replicas than this the table shows the first few and counts the rest."""
MOST_COLUMNS = 12
"""With more labels than this the table names the commonest of each replica."""
MOST_BARS = 64
"""With more replicas than this the picture draws areas."""
NAMED_LABELS = 20
"""With more labels than this the picture has a scale of colours instead of a legend."""


def partition_table(shares: Sequence[Share], how: str) -> Table:
    """Size and labels of each replica's share.

    Args:
      shares: in the order of ranks.
      how: the split, as it was asked for.

    Raises:
      MissingExtra: rich is not installed.
    """
    total = sum(share.size for share in shares)
    labels = len(shares[0].histogram)
    few = 0 < labels <= MOST_COLUMNS
    each = ", of each label" if few else ""
    title = f"{how}: {total:,} training samples on {len(shares):,} replicas{each}"
    table = new_table(title, box=None, padding=(0, 1, 0, 0), min_width=len(title))
    table.add_column("replica", justify="right")
    table.add_column("samples", justify="right")
    if few:
        for label in range(labels):
            table.add_column(str(label), justify="right")
    elif labels:
        table.add_column("labels", justify="right")
        table.add_column("most of")
    shown = shares if len(shares) <= MOST_ROWS else shares[: MOST_ROWS - 1]
    for rank, share in enumerate(shown):
        words = [f"{count:,}" if count else "·" for count in share.histogram] if few else _commonest(share)
        table.add_row(str(rank), f"{share.size:,}", *words)
    if len(shown) < len(shares):
        sizes = [share.size for share in shares[len(shown) :]]
        table.add_row(f"{len(sizes):,} more", f"{min(sizes):,} to {max(sizes):,}")
    return table


def _commonest(share: Share) -> list[str]:
    """How many labels there are, and the three commonest with their part of the share."""
    ranked = sorted(((count, label) for label, count in enumerate(share.histogram) if count), reverse=True)
    if not share.histogram:
        return []
    words = ", ".join(f"{label} ({100 * count / share.size:.0f} %)" for count, label in ranked[:3])
    return [str(len(ranked)), words]


def partition_picture(shares: Sequence[Share], path: Path, *, title: str) -> None:
    """Draws each replica's share as a bar of its labels.

    Args:
      shares: in the order of ranks.
      path: the PNG; its folder is made, and it appears whole or not at all.
      title: stands above the picture.

    Raises:
      MissingExtra: matplotlib is not installed.
    """
    height = min(9.0, max(3.2, 1.8 + 0.3 * len(shares)))
    with picture(path, (9, height), title, simulated=False) as figure:
        _draw(figure, figure.subplots(), shares)


def _draw(figure: Figure, axes: Axes, shares: Sequence[Share]) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import Normalize, to_hex

    axes.set_xlabel("training samples")
    ranks = np.arange(len(shares))
    sizes = np.array([share.size for share in shares], dtype=float)
    labels = len(shares[0].histogram)
    counts = np.array([share.histogram for share in shares]).T if labels else sizes[None]
    colours = [BLUE]
    if labels:
        scale = colormaps["tab10" if labels <= 10 else "tab20" if labels <= NAMED_LABELS else "turbo"]
        shades = range(labels) if labels <= NAMED_LABELS else np.linspace(0, 1, labels).tolist()
        colours = [to_hex(scale(shade)) for shade in shades]
    start = np.zeros(len(shares))
    for label, (count, colour) in enumerate(zip(counts, colours, strict=True)):
        if len(shares) <= MOST_BARS:
            axes.barh(ranks, count, left=start, height=0.8, color=colour, label=str(label))
        else:
            axes.fill_betweenx(
                ranks, start, start + count, step="mid", color=colour, linewidth=0, label=str(label)
            )
        start = start + count
    name_rows(axes, [str(rank) for rank in ranks], "replica")
    axes.set_xlim(0, float(sizes.max()) * 1.02)
    ticks(axes.xaxis, whole=True)
    if 0 < labels <= NAMED_LABELS:
        axes.legend(title="label", loc="center left", bbox_to_anchor=(1.0, 0.5))
    elif labels:
        from matplotlib.cm import ScalarMappable

        figure.colorbar(ScalarMappable(Normalize(0, labels - 1), "turbo"), ax=axes, label="label")
