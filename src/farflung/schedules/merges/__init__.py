"""Merges of the schedules, one per file."""

from farflung.schedules.merges.outer import Outer
from farflung.schedules.merges.pull import Pull, share_of_a_step
from farflung.schedules.merges.replace import Replace
from farflung.schedules.merges.swap import Swap

__all__ = ["Outer", "Pull", "Replace", "Swap", "share_of_a_step"]
