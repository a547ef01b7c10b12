"""Which replica the others wait for, and what makes it slow."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from farflung.telemetry import Event, number
from farflung.types import Json

__all__ = ["slowest"]

LEAST = 0.1
"""Of a step: what takes less holds up no replica."""


def slowest(events: Mapping[int, Sequence[Event]]) -> dict[str, Json] | None:
    """Finds what makes steps long, by their mean times on each replica.

    The slowest replica is the one that computes and waits for samples longest. For how much longer than the others it
    does so, by the median, they wait for it; what it waits for exchanges itself is the links' alone.

    Args:
      events: of all replicas, by rank.

    Returns:
      ``reason`` (compute, data or link), ``rank`` unless it is the links that all wait for, and ``share``, of a step;
      ``None`` where nothing takes a tenth of a step, or there are not two replicas.
    """
    times = {rank: found for rank, told in events.items() if (found := _means(told))}
    if len(times) < 2:
        return None
    rank = max(times, key=lambda one: times[one]["compute"] + times[one]["data"])
    own = times.pop(rank)
    lead = {
        name: own[name] - statistics.median(one[name] for one in times.values())
        for name in ("compute", "data")
    }
    reason, held_s = max(lead, key=lead.__getitem__), sum(lead.values())
    link = own["exposed"] >= held_s
    share = (own["exposed"] if link else held_s) / own["duration"] if own["duration"] else 0.0
    if share < LEAST:
        return None
    return {"reason": "link" if link else reason, **({} if link else {"rank": rank}), "share": share}


def _means(told: Sequence[Event]) -> dict[str, float]:
    steps = [event for event in told if event["event"] == "step" and "compute_s" in event]
    names = ("compute", "data", "exposed", "duration") if steps else ()
    return {name: statistics.fmean(number(step, f"{name}_s") for step in steps) for name in names}
