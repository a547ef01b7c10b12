"""The lab: real processes on this machine, joined by links as slow as a network profile says."""

from farflung.lab.lab import Counters, Lab
from farflung.lab.measure import TOLERANCE, Measured
from farflung.lab.queues import Condition

__all__ = ["TOLERANCE", "Condition", "Counters", "Lab", "Measured"]
