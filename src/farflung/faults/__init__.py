"""Faults of a run, described once for every world."""

from farflung.faults.injector import Condition, FaultInjector, Stage, Standing
from farflung.faults.plan import FAULTS, MEMBERSHIP, PASSING, Fault, FaultPlan, load_faults

__all__ = [
    "FAULTS",
    "MEMBERSHIP",
    "PASSING",
    "Condition",
    "Fault",
    "FaultInjector",
    "FaultPlan",
    "Stage",
    "Standing",
    "load_faults",
]
