"""Merges: how results that are due take effect in a replica, one file each."""

from collections.abc import Mapping

from farflung.errors import Unsupported
from farflung.replica.buckets import GradientBuckets
from farflung.replica.merges.decode import Decoding
from farflung.replica.merges.fetch import Fetching
from farflung.replica.merges.merger import Merger
from farflung.replica.merges.outer import OuterSteps
from farflung.replica.merges.pull import Pulling, share_of_a_step
from farflung.replica.merges.replace import Replacing
from farflung.replica.merges.swap import Swapping
from farflung.replica.merges.swap_gradient import SwappingGradients
from farflung.types import Decode, Fetch, Merge, NeedsLoss, Outer, Pull, Replace, Schedule, Swap, SwapGradient

__all__ = [
    "MERGERS",
    "Decoding",
    "Fetching",
    "Merger",
    "OuterSteps",
    "Pulling",
    "Replacing",
    "Swapping",
    "SwappingGradients",
    "mergers",
    "needs_the_loop",
    "share_of_a_step",
    "takes_whole",
]

MERGERS: dict[type[Merge], type[Merger]] = {
    Decode: Decoding,
    Fetch: Fetching,
    Outer: OuterSteps,
    Pull: Pulling,
    Replace: Replacing,
    Swap: Swapping,
    SwapGradient: SwappingGradients,
}
"""What carries out each kind of merge. A merge of one's own is added here, before a schedule that names it is used."""


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


def takes_whole(schedule: Schedule) -> str:
    """Why a schedule goes with no other members of a recipe that carry; empty where it does.

    Raises:
      Unsupported: a merge that is not in :data:`MERGERS`.
    """
    return next(filter(None, (_kind(schedule, merge).takes_whole for merge in schedule.merges)), "")


def needs_the_loop(schedule: Schedule) -> str:
    """Returns the reason why an external training loop cannot follow a schedule; empty where it can.

    Raises:
      Unsupported: a merge that is not in :data:`MERGERS`.
    """
    reasons = [_kind(schedule, merge).needs_the_loop(merge) for merge in schedule.merges]
    if isinstance(schedule, NeedsLoss):
        reasons.append(f"the loss, which it does not see, decides {schedule.needs_loss}")
    return next(filter(None, reasons), "")


def _kind(schedule: Schedule, merge: Merge) -> type[Merger]:
    if type(merge) not in MERGERS:
        known = ", ".join(sorted(each.__name__ for each in MERGERS))
        raise Unsupported(
            f"schedule {type(schedule).__name__}: nothing carries out merge {type(merge).__name__}; known: {known}; "
            "add one of your own to farflung.replica.merges.MERGERS"
        )
    return MERGERS[type(merge)]
