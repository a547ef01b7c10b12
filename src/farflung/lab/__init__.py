"""The lab: real processes on this machine, joined by links as slow as a network profile specifies."""

from farflung.lab.abilities import Ability, abilities, why_not
from farflung.lab.job import JobResult, run_job
from farflung.lab.lab import Counters, Lab
from farflung.lab.measure import TOLERANCE, Measured, as_measured
from farflung.lab.stage import check_plan

__all__ = [
    "TOLERANCE",
    "Ability",
    "Counters",
    "JobResult",
    "Lab",
    "Measured",
    "abilities",
    "as_measured",
    "check_plan",
    "run_job",
    "why_not",
]
