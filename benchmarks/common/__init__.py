"""What all benchmarks share: expected rows, stored results, verdicts, the command line."""

from benchmarks.common.command import Benchmark, Group, Measured, main
from benchmarks.common.in_turn import in_turn
from benchmarks.common.kept import Kept
from benchmarks.common.rows import Expected, Stored, Verdict, load_expected, source_hash, verdict
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
    "Simulated",
    "Stored",
    "Trainings",
    "Trial",
    "Trials",
    "Verdict",
    "coding_of",
    "in_turn",
    "load_expected",
    "main",
    "source_hash",
    "torchrun",
    "verdict",
]
