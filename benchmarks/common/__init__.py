"""What all benchmarks share: expected rows, stored results, verdicts, the command line."""

from benchmarks.common.command import Benchmark, Group, main
from benchmarks.common.in_turn import in_turn
from benchmarks.common.kept import Kept
from benchmarks.common.results import Expected, Measured, Result, judge, load_expected
from benchmarks.common.simulated import Simulated, coding_of
from benchmarks.common.trainings import Trainings
from benchmarks.common.trials import Trial, Trials
from benchmarks.common.workers import torchrun

__all__ = [
    "Benchmark",
    "Expected",
    "Group",
    "Kept",
    "Measured",
    "Result",
    "Simulated",
    "Trainings",
    "Trial",
    "Trials",
    "coding_of",
    "in_turn",
    "judge",
    "load_expected",
    "main",
    "torchrun",
]
