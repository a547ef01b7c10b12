"""Merges: how results that are due take effect in a replica, one file each."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from farflung.errors import Unsupported
from farflung.lazy import lazy
from farflung.replica.buckets import GradientBuckets
from farflung.types import Merge, Outer, Pull, Replace, Schedule, Swap

if TYPE_CHECKING:
    from farflung.replica.merges.merger import Merger
    from farflung.replica.merges.pull import share_of_a_step
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "merger": "Merger",
            "pull": "share_of_a_step",
        },
    )

__all__ = ["MERGERS", "Merger", "mergers", "needs_the_loop", "share_of_a_step"]

MERGERS: dict[type[Merge], type[Merger] | str] = {
    Outer: "farflung.replica.merges.outer:OuterSteps",
    Pull: "farflung.replica.merges.pull:Pulling",
    Replace: "farflung.replica.merges.replace:Replacing",
    Swap: "farflung.replica.merges.swap:Swapping",
}
"""What carries out each kind of merge, or ``module:name`` of it. A merge of one's own is added here, before a schedule
that names it is used."""


def mergers(schedule: Schedule, buckets: GradientBuckets) -> Mapping[type[Merge], Merger]:
    """What carries out a schedule's merges in a replica, by their kinds.

    Raises:
      Unsupported: a merge that is not in :data:`MERGERS`, or two of one kind.
    """
    found: dict[type[Merge], Merger] = {}
    for merge in schedule.merges:
        if type(merge) in found:
            raise Unsupported(
                f"schedule {type(schedule).__name__}: merge {type(merge).__name__} is named twice: name it once, and "
                "give transfers their own settings"
            )
        found[type(merge)] = _kind(schedule, merge)(merge, buckets)
    return found


def needs_the_loop(schedule: Schedule) -> str:
    """Returns the reason why an external training loop cannot follow a schedule; empty where it can.

    Raises:
      Unsupported: a merge that is not in :data:`MERGERS`.
    """
    reasons = [_kind(schedule, merge).needs_the_loop(merge) for merge in schedule.merges]
    if schedule.needs_loss:
        reasons.append(f"the loss, which it does not see, decides {schedule.needs_loss}")
    return next(filter(None, reasons), "")


def _kind(schedule: Schedule, merge: Merge) -> type[Merger]:
    if type(merge) not in MERGERS:
        known = ", ".join(sorted(each.__name__ for each in MERGERS))
        raise Unsupported(
            f"schedule {type(schedule).__name__}: nothing carries out merge {type(merge).__name__}; known: {known}; "
            "add one of your own to farflung.replica.merges.MERGERS"
        )
    merger = MERGERS[type(merge)]
    if not isinstance(merger, str):
        return merger
    module, _, name = merger.partition(":")
    found: type[Merger] = getattr(import_module(module), name)
    return found
