"""What goes wrong in a run, described once for every world."""

from farflung.faults.condition import Condition
from farflung.faults.injector import FaultInjector, Stage
from farflung.faults.loading import load_faults
from farflung.faults.plan import FAULTS, Fault, FaultPlan

__all__ = ["FAULTS", "Condition", "Fault", "FaultInjector", "FaultPlan", "Stage", "load_faults"]
