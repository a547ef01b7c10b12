"""Merges of the schedules, one per file."""

from farflung.schedules.merges.outer import Outer
from farflung.schedules.merges.pull import Pull, compute_step_share
from farflung.schedules.merges.replace import Replace
from farflung.schedules.merges.swap import Swap

__all__ = ["Outer", "Pull", "Replace", "Swap", "compute_step_share"]
