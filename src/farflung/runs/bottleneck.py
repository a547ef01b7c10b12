"""Analysis of the replica or link that slows a run down."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from farflung.telemetry import Event, read_number
from farflung.types import Json

__all__ = ["find_bottleneck"]

MIN_SHARE = 0.1
"""Smallest share of a step that counts as a bottleneck."""


def find_bottleneck(events: Mapping[int, Sequence[Event]]) -> dict[str, Json] | None:
    """Finds what most delays each step: a replica's computing or data, or the links; None if below a tenth.

    The slowest replica has the longest time of computing and waiting for samples. The others wait for the excess of
    that time over their median. The slowest replica's own wait for exchanges is due to links alone.

    Args:
      events: Events of all replicas, by rank.

    Returns:
      ``reason`` (compute, data or link), ``rank`` unless the reason is the links, and ``share`` of a step; ``None`` if
      the share is below a tenth or there are fewer than two replicas.
    """
    times = {rank: means for rank, rank_events in events.items() if (means := _compute_means(rank_events))}
    if len(times) < 2:
        return None
    rank = max(times, key=lambda r: times[r]["compute"] + times[r]["data"])
    slowest_means = times.pop(rank)
    excess_s = {
        name: slowest_means[name] - statistics.median(means[name] for means in times.values())
        for name in ("compute", "data")
    }
    reason, held_s = max(excess_s, key=excess_s.__getitem__), sum(excess_s.values())
    exposed_s, duration_s = slowest_means["exposed"], slowest_means["duration"]
    is_link = exposed_s >= held_s
    share = (exposed_s if is_link else held_s) / duration_s if duration_s else 0.0
    if share < MIN_SHARE:
        return None
    return {"reason": "link" if is_link else reason, **({} if is_link else {"rank": rank}), "share": share}


def _compute_means(events: Sequence[Event]) -> dict[str, float]:
    steps = [event for event in events if event["event"] == "step" and "compute_s" in event]
    names = ("compute", "data", "exposed", "duration") if steps else ()
    return {name: statistics.fmean(read_number(step, f"{name}_s") for step in steps) for name in names}
