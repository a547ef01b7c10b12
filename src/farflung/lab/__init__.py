"""The lab: real processes on this machine, joined by links as slow as a network profile specifies."""

from farflung.lab.abilities import Ability, check_abilities, explain_missing
from farflung.lab.job import JobResult, run_job
from farflung.lab.lab import Counters, Lab
from farflung.lab.measure import TOLERANCE, PairMeasurement, apply_measured_delays
from farflung.lab.stage import check_fault_plan

__all__ = [
    "TOLERANCE",
    "Ability",
    "Counters",
    "JobResult",
    "Lab",
    "PairMeasurement",
    "apply_measured_delays",
    "check_abilities",
    "check_fault_plan",
    "explain_missing",
    "run_job",
]
