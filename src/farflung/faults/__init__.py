"""What goes wrong in a run, described once for every world."""

from farflung.faults.condition import Condition
from farflung.faults.injector import FaultInjector, Stage
from farflung.faults.loading import load_faults
from farflung.faults.plan import FAULTS, MEMBERSHIP, PASSING, Fault, FaultPlan
from farflung.faults.standing import Standing

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
