"""Faults of a run, described once for every world."""

from farflung.faults.injector import ActiveFaults, FaultEnvironment, FaultInjector, LinkCondition
from farflung.faults.plan import FAULTS, MEMBERSHIP_KINDS, TEMPORARY_KINDS, Fault, FaultPlan, load_faults

__all__ = [
    "FAULTS",
    "MEMBERSHIP_KINDS",
    "TEMPORARY_KINDS",
    "ActiveFaults",
    "Fault",
    "FaultEnvironment",
    "FaultInjector",
    "FaultPlan",
    "LinkCondition",
    "load_faults",
]
