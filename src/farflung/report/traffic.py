"""Bytes sent between each pair of ranks, by purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from farflung.comm import Purpose
from farflung.errors import DataError
from farflung.report.tables import create_table
from farflung.telemetry import Event

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["TrafficByKind", "read_traffic", "render_traffic_table", "select_finished"]

TrafficByKind: TypeAlias = "dict[str, dict[int, list[int]]]"
"""Payload bytes to each rank, by kind and sender."""


def select_finished(events_by_rank: Mapping[int, Sequence[Event]]) -> dict[int, Sequence[Event]]:
    """Selects the events of replicas that have reached the end of the run, without those that it lost."""
    finished: dict[int, Sequence[Event]] = {}
    for rank, events in events_by_rank.items():
        bounds = [event["event"] for event in events if event.get("event") in ("begin", "end")]
        if bounds and bounds[-1] == "end":
            finished[rank] = events
    return finished


def read_traffic(events_by_rank: Mapping[int, Sequence[Event]]) -> TrafficByKind:
    """Reads the final traffic of a run's finished replicas, with kinds in the order of :class:`farflung.comm.Purpose`.

    Args:
      events_by_rank: Events of each replica known here; a run on several machines has some on each.

    Raises:
      DataError: No replica has reached its end, or its events are damaged.
    """
    if not events_by_rank:
        raise DataError("the run has no telemetry events, so its traffic is unknown")
    events_by_rank = select_finished(events_by_rank) or events_by_rank
    by_rank = {rank: _read_sent_nbytes(rank, events_by_rank[rank]) for rank in sorted(events_by_rank)}
    kinds = dict.fromkeys((*(purpose.kind for purpose in Purpose), *sorted(set().union(*by_rank.values()))))
    traffic = {kind: {rank: sent[kind] for rank, sent in by_rank.items() if kind in sent} for kind in kinds}
    return {kind: senders for kind, senders in traffic.items() if senders}


def _read_sent_nbytes(rank: int, events: Sequence[Event]) -> dict[str, list[int]]:
    ends = [event for event in events if event.get("event") == "end"]
    if not ends:
        raise DataError(f"rank {rank} has not reached the end of the run, where it reports what it has sent")
    sent: Any = ends[-1].get("bytes_sent_to")
    lists = list(sent.values()) if isinstance(sent, dict) else [None]
    counts = [count for row in lists for count in (row if isinstance(row, list) else [None])]
    if not all(type(count) is int and count >= 0 for count in counts):
        raise DataError(
            f"rank {rank}: bytes_sent_to at its end is no list of bytes for each kind; it is damaged"
        )
    checked: dict[str, list[int]] = sent
    return checked


def render_traffic_table(traffic: TrafficByKind, *, title: str = "") -> Table:
    """Renders the payload bytes of each pair of ranks with traffic, by kind, with the sum of each kind and of all.

    Args:
      traffic: Result of :func:`read_traffic`.
      title: Title above the table.

    Raises:
      MissingExtra: rich is not installed.
    """
    table = create_table(title)
    for name in ("kind", "from → to"):
        table.add_column(name)
    table.add_column("bytes", justify="right")
    total = 0
    for kind, senders in traffic.items():
        pairs = [(src, dst, count) for src, to in senders.items() for dst, count in enumerate(to) if count]
        kind_total = sum(count for _, _, count in pairs)
        total += kind_total
        table.add_row(kind, "all", f"{kind_total:,}", style="bold")
        for src, dst, count in sorted(pairs):
            table.add_row("", f"{src} → {dst}", f"{count:,}")
        table.add_section()
    table.add_row("all kinds", "all", f"{total:,}", style="bold")
    return table
