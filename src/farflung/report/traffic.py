"""Bytes sent from each rank to each other, by purpose: a table and a picture of pairs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from farflung.comm import KINDS
from farflung.errors import DataError
from farflung.report.pictures import INK, NAMED_RANKS, picture
from farflung.report.tables import new_table
from farflung.telemetry import Event

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

__all__ = ["SentByKind", "sent_by_kind", "traffic_picture", "traffic_table"]

SentByKind: TypeAlias = "dict[str, dict[int, list[int]]]"
"""For each kind, and each sender, the payload bytes to each rank."""

WRITTEN_RANKS = 8
"""Up to so many, the picture has its figures in it."""


def sent_by_kind(events_by_rank: Mapping[int, Iterable[Event]]) -> SentByKind:
    """What the replicas of a run say at its end, kinds in the order of :data:`farflung.comm.KINDS`.

    Args:
      events_by_rank: the events of each replica that is known of; on several machines, each has those of its own.

    Raises:
      DataError: a replica has not come to its end, or its events are damaged.
    """
    if not events_by_rank:
        raise DataError("the run has no telemetry events, so its traffic is unknown")
    by_rank = {rank: _at_the_end(rank, events_by_rank[rank]) for rank in sorted(events_by_rank)}
    kinds = dict.fromkeys((*KINDS.values(), *sorted(set().union(*by_rank.values()))))
    found = {kind: {rank: sent[kind] for rank, sent in by_rank.items() if kind in sent} for kind in kinds}
    return {kind: senders for kind, senders in found.items() if senders}


def _at_the_end(rank: int, events: Iterable[Event]) -> dict[str, list[int]]:
    ends = [event for event in events if event.get("event") == "end"]
    if not ends:
        raise DataError(f"rank {rank} has not come to the end of the run, where it reports what it has sent")
    sent: Any = ends[-1].get("bytes_sent_to")
    if sent is None:
        raise DataError(f"rank {rank} has not reported what it has sent: the run is of an older version")
    lists = list(sent.values()) if isinstance(sent, dict) else [None]
    counts = [count for one in lists for count in (one if isinstance(one, list) else [None])]
    if not all(type(count) is int and count >= 0 for count in counts):
        raise DataError(
            f"rank {rank}: bytes_sent_to at its end is no list of bytes for each kind; it is damaged"
        )
    checked: dict[str, list[int]] = sent
    return checked


def traffic_table(sent: SentByKind, *, title: str = "") -> Table:
    """Payload bytes of each pair that anything was sent in: a column for each kind, and one for their sum.

    Args:
      sent: what :func:`sent_by_kind` gives.
      title: stands above the table.

    Raises:
      MissingExtra: rich is not installed.
    """
    table = new_table(title, show_footer=True)
    by_pair = {kind: _by_pair(senders) for kind, senders in sent.items()}
    table.add_column("from → to", "all", no_wrap=True)
    for kind, pairs in by_pair.items():
        table.add_column(kind, f"{sum(pairs.values()):,}", justify="right", no_wrap=True)
    whole = sum(sum(pairs.values()) for pairs in by_pair.values())
    table.add_column("sum", f"{whole:,}", justify="right", no_wrap=True, style="bold")
    for src, dst in sorted(set().union(*by_pair.values())):
        counts = [pairs.get((src, dst), 0) for pairs in by_pair.values()]
        words = [f"{count:,}" if count else "·" for count in counts]
        table.add_row(f"{src} → {dst}", *words, f"{sum(counts):,}")
    return table


def _by_pair(senders: Mapping[int, Sequence[int]]) -> dict[tuple[int, int], int]:
    return {(src, dst): count for src, to in senders.items() for dst, count in enumerate(to) if count}


def traffic_picture(sent: SentByKind, path: Path, *, title: str) -> None:
    """Draws the payload bytes of all kinds as a square for each pair.

    Args:
      sent: what :func:`sent_by_kind` gives.
      path: the PNG; its folder is made, and it appears whole or not at all.
      title: stands above the picture.

    Raises:
      DataError: nothing was sent.
      MissingExtra: matplotlib is not installed.
    """
    pairs = sum((Counter(_by_pair(senders)) for senders in sent.values()), Counter[tuple[int, int]]())
    if not pairs:
        raise DataError(f"no picture for {path}: nothing was sent")
    size = max(len(to) for senders in sent.values() for to in senders.values())
    with picture(path, (7, 6), title, simulated=False) as figure:
        _draw(figure, figure.subplots(), pairs, size)


def _draw(figure: Figure, axes: Axes, pairs: Mapping[tuple[int, int], int], size: int) -> None:
    from matplotlib.ticker import EngFormatter

    counts = np.full((size, size), np.nan)
    for pair, count in pairs.items():
        counts[pair] = count
    most = float(np.nanmax(counts))
    axes.grid(visible=False)
    axes.set(xlabel="to rank", ylabel="from rank")
    squares = axes.imshow(counts, cmap="Blues", vmin=0, vmax=most)
    ranks = range(0, size, math.ceil(size / NAMED_RANKS))
    axes.set_xticks(ranks)
    axes.set_yticks(ranks)
    axes.tick_params(length=0)
    figure.colorbar(squares, ax=axes, label="payload bytes sent", format=EngFormatter("B"))
    if size <= WRITTEN_RANKS:
        words = EngFormatter("B", places=1)
        for (src, dst), count in pairs.items():
            ink = "white" if count > 0.6 * most else INK
            axes.text(dst, src, words(count), ha="center", va="center", color=ink, fontsize=9)
